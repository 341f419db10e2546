#include "exec/pull/reduction.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/fail.h"
#include "base/mutex.h"
#include "codec/simd/reduce.h"
#include "exec/units.h"

namespace tessera {
namespace {

// The last step: rounds all accumulators to the source's dtype.
class FinishRun final : public TransferRun {
 public:
  FinishRun(std::vector<ReductionTarget> targets, WorkerPool& pool, Done done)
      : TransferRun(pool, std::move(done), 0), targets_(std::move(targets)) {
    std::vector<PartSize> sizes;
    for (const ReductionTarget& target : targets_) {
      finish_.push_back(finish_row(target.op, target.dtype));
      sizes.push_back({.atoms = target.elements, .atom_bytes = bits_of(accumulator_of(target.dtype)) / 8});
    }
    units_ = cut_into_units(sizes);
  }
  int64_t bytes() const override { return 0; }
  void set_result_offset(size_t bytes) { result_offset_ = bytes; }

 private:
  size_t units() const override { return units_.size(); }
  void prepare(uint32_t) override {}
  void interrupt(const Status&) override {}
  void run_unit(size_t index, std::span<std::byte>) override {
    const auto elements_of = [&](uint32_t t) { return targets_[t].elements; };
    for_each_part(units_[index], elements_of, [&](uint32_t t, int64_t first, int64_t last) {
      const ReductionTarget& target = targets_[t];
      finish_[t](target.accumulator + bytes_of(accumulator_of(target.dtype), first),
                 target.result + result_offset_ + bytes_of(target.dtype, first), static_cast<size_t>(last - first),
                 target.peers);
    });
  }

  std::vector<ReductionTarget> targets_;
  std::vector<FinishRow> finish_;
  std::vector<Unit> units_;
  size_t result_offset_ = 0;
};

}  // namespace

// Runs go one after the other: the end of each starts the next.
struct ReduceRun::Impl {
  Impl(std::vector<Step> given, std::vector<ReductionTarget> targets, WorkerPool& pool, Done on_done,
       const RunOptions& options)
      : done(std::move(on_done)) {
    for (Step& step : given) {
      on_start.push_back(std::move(step.on_start));
      runs.push_back(std::make_unique<PullRun>(
          std::move(step.program), pool, [this] { next(); }, std::move(step.stream), options));
      bytes += runs.back()->bytes();
    }
    on_start.emplace_back();
    auto last = std::make_unique<FinishRun>(std::move(targets), pool, [this] { next(); });
    finishing = last.get();
    runs.push_back(std::move(last));
  }

  // Once a run is started, the whole chain may end, and this object go, at any moment.
  void begin(size_t index) EXCLUDES(mutex) {
    if (on_start[index]) on_start[index]();
    {
      const MutexLock lock(mutex);
      if (status.ok()) {
        current = index;
        return runs[index]->start(epoch);
      }
    }
    finish();
  }

  // The current run has ended.
  void next() EXCLUDES(mutex) {
    size_t following = 0;
    bool over = false;
    {
      const MutexLock lock(mutex);
      if (status.ok()) status = runs[current]->status();
      following = current + 1;
      over = !status.ok() || following == runs.size();
    }
    return over ? finish() : begin(following);
  }

  void finish() {
    running.store(false, std::memory_order_release);
    if (done) done();
  }

  Done done;
  std::vector<std::function<void()>> on_start;
  std::vector<std::unique_ptr<TransferRun>> runs;  // one a step, and the last
  FinishRun* finishing = nullptr;
  int64_t bytes = 0;
  std::atomic<bool> running{false};
  mutable Mutex mutex;
  uint32_t epoch GUARDED_BY(mutex) = 0;
  size_t current GUARDED_BY(mutex) = 0;
  Status status GUARDED_BY(mutex);
};

ReduceRun::ReduceRun(std::vector<Step> steps, std::vector<ReductionTarget> targets, WorkerPool& pool, Done done,
                     const RunOptions& options)
    : impl_(std::make_unique<Impl>(std::move(steps), std::move(targets), pool, std::move(done), options)) {}

ReduceRun::~ReduceRun() {
  TESSERA_CHECK(!running());
}

void ReduceRun::start(uint32_t epoch, size_t result_offset) {
  TESSERA_CHECK(!running());
  {
    const MutexLock lock(impl_->mutex);
    impl_->status = {};
    impl_->epoch = epoch;
    impl_->finishing->set_result_offset(result_offset);
    impl_->running.store(true, std::memory_order_release);
  }
  impl_->begin(0);
}

void ReduceRun::abort(const Status& status) {
  const MutexLock lock(impl_->mutex);
  if (!running() || !impl_->status.ok()) return;
  impl_->status = status;
  impl_->runs[impl_->current]->abort(status);
}

bool ReduceRun::running() const {
  return impl_->running.load(std::memory_order_acquire);
}

int64_t ReduceRun::bytes_done() const {
  int64_t bytes = 0;
  for (const auto& run : impl_->runs) bytes += run->bytes_done();
  return bytes;
}

int64_t ReduceRun::bytes() const {
  return impl_->bytes;
}

Status ReduceRun::status() const {
  const MutexLock lock(impl_->mutex);
  return impl_->status;
}

}  // namespace tessera
