#include "exec/transfer_run.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "base/fail_point.h"

namespace tessera {

TransferRun::TransferRun(WorkerPool& pool, Done done, size_t digests)
    : pool_(pool), done_(std::move(done)), lanes_(static_cast<size_t>(pool.threads())), digests_(digests) {
  for (Lane& lane : lanes_) lane.owner = this;
}

TransferRun::~TransferRun() {
  TESSERA_CHECK(!running());
}

void TransferRun::start(uint32_t epoch, const SampleSeed& sample) {
  TESSERA_CHECK(!running());
  sample_ = sample;
  std::fill(digests_.begin(), digests_.end(), Digest{});
  bytes_done_.store(0, std::memory_order_relaxed);
  next_unit_.store(0, std::memory_order_relaxed);
  {
    const MutexLock lock(mutex_);
    status_ = {};
    failed_.store(false, std::memory_order_relaxed);
    prepare(epoch);
    running_.store(true, std::memory_order_release);
  }
  // At least one lane, so that a worker always calls done_. This object may be destroyed once all are submitted.
  const size_t lanes = std::clamp<size_t>(units(), 1, lanes_.size());
  lanes_left_.store(static_cast<int>(lanes), std::memory_order_release);
  WorkerPool& pool = pool_;
  Lane* lane = lanes_.data();
  for (size_t l = 0; l < lanes; ++l) pool.submit(lane[l]);
}

void TransferRun::abort(const Status& status) {
  const MutexLock lock(mutex_);
  if (!running() || failed_.load(std::memory_order_relaxed)) return;
  status_ = status;
  failed_.store(true, std::memory_order_relaxed);
  interrupt(status);
}

Status TransferRun::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

void TransferRun::add_digest(size_t route, const Digest& digest) {
  Digest& sum = digests_[route];
  for (size_t k = 0; k < 2; ++k) std::atomic_ref(sum.d[k]).fetch_add(digest.d[k], std::memory_order_relaxed);
  std::atomic_ref(sum.elements).fetch_add(digest.elements, std::memory_order_relaxed);
}

void TransferRun::run_lane(std::span<std::byte> scratch) {
  const size_t count = units();
  while (!aborted()) {
    const size_t unit = next_unit_.fetch_add(1, std::memory_order_relaxed);
    if (unit >= count) break;
    fail_point("transfer: unit");
    run_unit(unit, scratch);
  }
  if (lanes_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  {
    const MutexLock lock(mutex_);  // wait for a concurrent abort() before anyone is told
    running_.store(false, std::memory_order_release);
  }
  if (done_) done_();
}

}  // namespace tessera
