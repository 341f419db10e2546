// An agent's memory of one client's commands, so that none is executed twice: which ones are being executed, and how
// the last ones ended. It belongs to an incarnation of the client and outlives the queues through which commands come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "command/ring.h"
#include "tessera/error.h"

namespace tessera {

// How a command ended: a result, unless the status is an error.
struct CommandOutcome {
  Status status;
  std::vector<std::byte> result;  // at most kMaxRecordPayload
  bool operator==(const CommandOutcome&) const = default;
};

// A reply's type and payload. Long error texts are truncated.
uint16_t write_outcome(const CommandOutcome& outcome, std::vector<std::byte>& payload);
// Throws Error(kInvalidArgument) for a reply that no agent writes.
CommandOutcome read_outcome(const Record& reply);

// Receives the outcome of a command. Thread-safe.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void reply(uint64_t id, const CommandOutcome& outcome) = 0;
};

// Thread-safe.
class CommandLog {
 public:
  static constexpr size_t kRemembered = 1024;
  static constexpr size_t kMostRunning = 4096;

  explicit CommandLog(uint64_t incarnation, size_t remembered = kRemembered)
      : incarnation_(incarnation), remembered_(remembered) {}

  uint64_t incarnation() const { return incarnation_; }
  size_t running() const;

  // A command has come. True if it must be executed now: then call finish() in the end. Otherwise the command has come
  // before, and the sink gets its outcome, now or when it ends: kNotFound if it is too old to be remembered;
  // kResourceExhausted, and it may come again, if too many are running.
  bool begin(uint64_t id, const std::shared_ptr<ReplySink>& sink);
  void finish(uint64_t id, CommandOutcome outcome);

 private:
  const uint64_t incarnation_;
  const size_t remembered_;
  mutable Mutex mutex_;
  std::map<uint64_t, std::vector<std::weak_ptr<ReplySink>>> running_ GUARDED_BY(mutex_);
  std::map<uint64_t, CommandOutcome> finished_ GUARDED_BY(mutex_);
  std::deque<uint64_t> order_ GUARDED_BY(mutex_);  // of finished_
  // The highest forgotten id: an unknown id below it may have been executed.
  uint64_t forgotten_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
