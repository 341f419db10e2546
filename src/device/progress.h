// How far a stream has come: what its events look at and wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/event.h"

namespace tessera::device {

// A stream whose waiting hosts help it.
class Helped {
 public:
  virtual ~Helped() = default;
  // Runs what comes up to this ticket and could run now, unless somebody else runs something.
  virtual void help(uint64_t ticket) = 0;
};

// Tickets of a stream are numbered from 1 and end in order; an event's ticket is the last one before it. Shared by the
// stream and its events, which may outlive it. Thread-safe; one thread at a time ends tickets.
class Progress final : public EventSource {
 public:
  explicit Progress(std::string name) : name_(std::move(name)) {}

  bool done(uint64_t ticket) const override { return ended_.load(std::memory_order_acquire) >= ticket; }
  bool wait(uint64_t ticket, const Deadline& deadline) const override;
  Status status(uint64_t ticket) const override;
  std::string to_string() const override { return "stream " + name_; }
  void help(uint64_t ticket) const override {
    if (const auto stream = helped_.lock()) stream->help(ticket);
  }

  // Before the first event.
  void set_helped(std::weak_ptr<Helped> stream) { helped_ = std::move(stream); }
  // Wakes who waits for it. All that the ticket did happens before.
  void end(uint64_t ticket);
  // Poisons the stream from this ticket on.
  void fail(uint64_t ticket, Status status);
  bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }
  // Whether a ticket must be skipped.
  bool skips(uint64_t ticket) const { return poisoned_once_.load(std::memory_order_acquire) && !status(ticket).ok(); }
  // The poison that is in force.
  Status status() const;
  // Ends the poison with this ticket; later ones run.
  Status forget(uint64_t last);

 private:
  struct Failure {
    uint64_t first;
    uint64_t last;
    Status status;
  };
  static constexpr uint64_t kNobody = UINT64_MAX;

  const std::string name_;
  std::weak_ptr<Helped> helped_;  // empty: nobody helps
  std::atomic<uint64_t> ended_{0};
  mutable std::atomic<uint64_t> wake_at_{kNobody};  // the lowest ticket that somebody sleeps for
  mutable std::atomic<uint32_t> bell_{0};
  std::atomic<bool> poisoned_{false};
  std::atomic<bool> poisoned_once_{false};
  mutable Mutex mutex_;
  std::vector<Failure> failures_ GUARDED_BY(mutex_);  // in order
};

}  // namespace tessera::device
