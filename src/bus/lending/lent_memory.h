// Private memory that a worker lends to its agent daemon, which may not touch it. The agent sees addresses without
// memory behind them, so that it plans, compares and describes the tensors there like any others. What reads or writes
// them is a run in the worker's process (lender.h), which this side makes, starts and follows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/process.h"
#include "bus/lending/messages.h"
#include "bus/registration/local_tensors.h"
#include "exec/pull/compiler.h"
#include "exec/run.h"
#include "exec/walk/route.h"
#include "peer/agent.h"
#include "peer/link.h"
#include "peer/stop_detector.h"
#include "transport/byte_stream.h"
#include "transport/remote_key.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

class LentRun;

// Serves one batch. Any thread may call sync() and what does not change; the owner's thread calls set_tensors() before
// connect(); everything else, runs included, belongs to the agent's loop.
class LentMemory : public std::enable_shared_from_this<LentMemory> {
 public:
  // Reserves `bytes` of addresses for what `worker` lends. Throws Error(kResourceExhausted).
  LentMemory(uint64_t bytes, const Incarnation& worker, std::string worker_name);
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  bool holds(const std::byte* byte) const { return byte >= data_ && byte < data_ + bytes_; }
  // Whether one of `routes` begins or ends in lent memory (a pull: ends).
  template <typename Routes>
  bool touches(const Routes& routes) const {
    return std::ranges::any_of(routes, [this](const auto& route) { return holds(route.data); });
  }

  // All tensors that the worker has registered, lent or not, in its order; before connect().
  void set_tensors(std::vector<LocalTensor> tensors);
  // `socket` leads to the worker's lender. `on_lost` is called if the worker goes before close().
  void connect(Agent& agent, UniqueFd socket, std::function<void(const Status&)> on_lost);
  // Nothing of the worker's is used after this. REQUIRES: no run is under way, or the worker has gone.
  void close();
  // Ends the runs of a worker that is stopped instead of waiting for it. Call it every kStopPeriod while something
  // waits.
  void end_if_stopped();

  // `done` is called on the loop each time a run has ended, from within start() too; it may only raise a LoopSignal. A
  // run that was made with `stream` must be given one before it is started.
  std::unique_ptr<LentRun> make_source(const std::string& peer_name, std::span<const SourceRoute> routes, bool digest,
                                       bool stream, std::function<void()> done);
  // Reads another rank's memory, for which that rank has given `keys`.
  struct Peer {
    Incarnation process;
    std::string name;
    std::span<const RemoteKey> keys;
  };
  std::unique_ptr<LentRun> make_pull(const Peer& peer, std::span<const PullRoute> routes, bool digest, bool stream,
                                     std::function<void()> done);
  // A copy between the worker's tensors and the agent's memory, in either direction. A route's source is an
  // own_range().
  std::unique_ptr<LentRun> make_copy(std::span<const PullRoute> routes, std::function<void()> done);
  // Returns once the worker has made all runs so far. Throws the error if one could not be made, kPeerLost (also if the
  // worker is stopped), kDeadlineExceeded, kCancelled. Not on the loop.
  void sync(const Deadline& deadline, const std::stop_token& stop);

 private:
  friend class LentRun;
  class Maker;

  void handle(Frame& frame);
  void handle_ended(RunEnded ended);
  void lose(const Status& status);
  LentRun* find(uint32_t run) const;

  const Incarnation worker_;
  const std::string name_;  // "the worker pid 4711 ..."
  std::byte* data_ = nullptr;
  const uint64_t bytes_;
  std::vector<LocalTensor> tensors_;
  std::multimap<const std::byte*, uint32_t> places_;  // the tensors' numbers, by their first elements
  Agent* agent_ = nullptr;
  std::function<void(const Status&)> on_lost_;
  std::shared_ptr<Link> link_;
  std::map<uint32_t, LentRun*> runs_;
  uint32_t last_run_ = 0;
  StopDetector stop_detector_;
  TimePoint heard_{};

  Mutex mutex_;
  StoppableCondVar changed_;
  uint32_t last_sync_ GUARDED_BY(mutex_) = 0;
  Synced synced_ GUARDED_BY(mutex_);
  Status lost_ GUARDED_BY(mutex_);
};

// A run in the worker's process. Used on the loop's thread.
class LentRun final : public Run {
 public:
  ~LentRun() override;

  // REQUIRES: the run was made with a stream, and has not been given one yet.
  void give_stream(StreamEnd end);
  void start(uint32_t epoch, const SampleSeed& sample = {}) override;
  void abort(const Status& status) override;
  bool running() const { return running_; }
  int64_t bytes_done() const override { return bytes_done_.load(std::memory_order_relaxed); }
  Status status() const override { return status_; }
  std::span<const Digest> digests() const override { return digests_; }

 private:
  friend class LentMemory;
  LentRun(std::shared_ptr<LentMemory> memory, const MakeRun& made, std::function<void()> done);
  void end(const Status& status);
  void set_bytes_done(int64_t bytes);  // as the worker reports

  const std::shared_ptr<LentMemory> memory_;
  const uint32_t number_;
  const std::function<void()> done_;
  int64_t bytes_ = 0;  // of all its routes
  bool running_ = false;
  uint32_t epoch_ = 0;
  std::atomic<int64_t> bytes_done_{0};
  Status status_;
  std::vector<Digest> digests_;
};

}  // namespace tessera::bus
