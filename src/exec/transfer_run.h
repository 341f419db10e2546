// One transfer, on either side: the common part of PullRun, SourceRun and ReduceRun.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "exec/run.h"
#include "exec/worker_pool.h"
#include "tessera/error.h"

namespace tessera {

// Splits work into units that the pool's threads take in turn. Reusable: call start() again once it is done; start()
// allocates nothing. Thread-safe, except start() and the results, which belong to the owner once the run is done.
class TransferRun : public Run {
 public:
  // Called once for each start(), on a worker thread, after the last access to anyone's memory. Must not throw or
  // block. It may start other runs, and this one again; it must not destroy this run. Wait for Done, not until
  // running() is false: the run may be destroyed only once Done has returned.
  using Done = std::function<void()>;

  ~TransferRun() override;  // REQUIRES: it is not running

  void start(uint32_t epoch, const SampleSeed& sample = {}) final;
  void abort(const Status& status) final;  // any thread

  bool running() const { return running_.load(std::memory_order_acquire); }
  int64_t bytes_done() const final { return bytes_done_.load(std::memory_order_relaxed); }
  virtual int64_t bytes() const = 0;  // in all

  Status status() const final;
  std::span<const Digest> digests() const final { return digests_; }

 protected:
  TransferRun(WorkerPool& pool, Done done, size_t digests);

  // The number of units that may run concurrently, and the work of unit `index`. run_unit() must not throw; it polls
  // aborted() at least once per megabyte.
  virtual size_t units() const = 0;
  virtual void run_unit(size_t index, std::span<std::byte> scratch) = 0;
  virtual void prepare(uint32_t epoch) = 0;          // at start(), before any unit
  virtual void interrupt(const Status& status) = 0;  // at abort() and the first failure: wakes waiters

  bool aborted() const { return failed_.load(std::memory_order_relaxed); }
  void add_bytes(int64_t bytes) { bytes_done_.fetch_add(bytes, std::memory_order_relaxed); }
  void add_digest(size_t route, const Digest& digest);  // any worker
  // The complete digest of a route, from the only worker that has it: avoids the locked instructions of add_digest(),
  // each of which waits for the streaming stores before it.
  void put_digest(size_t route, const Digest& digest) { digests_[route] = digest; }
  const SampleSeed& sample() const { return sample_; }  // as start() was told

 private:
  class Lane final : public Job {
   public:
    void run(std::span<std::byte> scratch) override { owner->run_lane(scratch); }
    TransferRun* owner = nullptr;
  };
  void run_lane(std::span<std::byte> scratch);

  WorkerPool& pool_;
  Done done_;
  std::vector<Lane> lanes_;
  std::vector<Digest> digests_;
  SampleSeed sample_;
  std::atomic<size_t> next_unit_{0};
  std::atomic<int> lanes_left_{0};
  std::atomic<int64_t> bytes_done_{0};
  std::atomic<bool> running_{false};
  std::atomic<bool> failed_{false};
  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera
