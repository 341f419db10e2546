// Captures of a runtime: what is recorded, and what a replay does.
#include <utility>

#include "base/fail.h"
#include "etp/runtime_impl.h"
#include "layout/text_reader.h"

namespace tessera::etp {

std::shared_ptr<CapturedPart> RuntimeImpl::begin_capture() {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "a capture begins inside an update"_message);
  auto part = std::make_shared<CapturedPart>();
  const device::Event before = context_.compute->runs_inline() ? device::Event() : context_.compute->record();
  part->scope.emplace(part->operations, std::vector{context_.compute});
  // Called by whoever releases a FullWeight while this is recorded; the part lives that long.
  memory_->begin_capture(before, [this, captured = part.get()](uint32_t slot) {
    const MutexLock lock(captured->mutex);
    captured->released.push_back({.slot = slot, .after = captured->recorded});
    captured->operations.call([this, captured, slot]() NO_THREAD_SAFETY_ANALYSIS {  // of replay(), with the lock
      consumptions_.replay_release(*captured, slot);
    });
  });
  ++context_.captures;
  part->counted = true;
  capturing_ = part;
  return part;
}

void RuntimeImpl::end_capture(bool stands) {
  const std::shared_ptr<CapturedPart> part = std::exchange(capturing_, nullptr);
  memory_->end_capture();
  part->scope.reset();
  try {
    consumptions_.end_capture(*part);
  } catch (...) {
    forget(*part);
    if (stands) throw;
    return;
  }
  if (!stands) forget(*part);
}

void RuntimeImpl::forget(CapturedPart& part) {
  consumptions_.forget(part);
  if (std::exchange(part.counted, false)) --context_.captures;
}

void RuntimeImpl::drop(std::shared_ptr<CapturedPart> part) {
  const MutexLock lock(dropped_mutex_);
  dropped_.push_back(std::move(part));
}

void RuntimeImpl::forget_dropped() {
  std::vector<std::shared_ptr<CapturedPart>> dropped;
  {
    const MutexLock lock(dropped_mutex_);
    dropped.swap(dropped_);
  }
  for (const auto& part : dropped) forget(*part);
}

void RuntimeImpl::capture_use(std::span<Parameter* const> weights, Phase phase, const Use& use,
                              std::span<FullWeight> out) {
  CapturedPart& part = *capturing_;
  const size_t index = part.uses.size();
  try {
    consumptions_.capture(weights, phase, use, out, part);
  } catch (...) {
    part.failure = std::current_exception();
    throw;
  }
  part.operations.call([this, captured = &part, index]() NO_THREAD_SAFETY_ANALYSIS {  // of replay(), with the lock
    replay_use(*captured, index);
  });
}

void RuntimeImpl::replay_use(CapturedPart& part, size_t index) {
  consumptions_.replay_use(part, index);
  const CapturedUse& use = part.uses[index];
  if (use.phase != Phase::kForward || !use.expects_backward) return;
  for (const Parameter* p : consumptions_.weights_of(use))
    if (p->trained()) gradients_.announce(*p, use.micro_batch + part.micro_batch);
}

void RuntimeImpl::capture_gradients(std::span<GradientBuffer> gradients) {
  CapturedPart& part = *capturing_;
  std::vector<CapturedGradient> captured = gradients_.capture(gradients);
  for (const CapturedGradient& gradient : captured) part.produced.push_back(gradient.weight);
  part.operations.call([this, of = &part, captured = std::move(captured)]() NO_THREAD_SAFETY_ANALYSIS {  // likewise
    gradients_.replay(captured, of->micro_batch);
  });
}

void RuntimeImpl::replay(CapturedPart& part, int micro_batch) {
  if (in_update_) fail(ErrorCode::kInvalidArgument, "a capture is replayed inside an update"_message);
  for (const WeightId weight : part.produced)
    if (const Parameter& p = *context_.parameters[weight]; !p.trained())
      fail(ErrorCode::kInvalidArgument,
           "{} was frozen after it was captured with its gradient: capture that again"_message,
           tessera::quoted(p.name()));
  part.micro_batch = micro_batch;
  ++context_.counters.replays;
  try {
    consumptions_.begin_replay(part);
    part.operations.replay();
  } catch (...) {
    consumptions_.recover(part);
    throw;
  }
}

void RuntimeImpl::reallocate(CapturePool pool) {
  if (pool.allocate == nullptr || pool.free == nullptr)
    fail(ErrorCode::kInvalidArgument, "a capture pool has two functions: allocate and free"_message);
  if (!in_update_) consumptions_.stop();
  memory_->reallocate({.allocate = std::move(pool.allocate),
                       .free = [free = std::move(pool.free)](std::byte* memory, int64_t bytes, const LastReader&) {
                         free(memory, bytes);
                       }});
}

CapturedStep::CapturedStep(CapturedStep&& other) noexcept {
  *this = std::move(other);
}

CapturedStep& CapturedStep::operator=(CapturedStep&& other) noexcept {
  if (this == &other) return *this;
  reset();
  runtime_ = std::move(other.runtime_);
  part_ = std::move(other.part_);
  return *this;
}

CapturedStep::~CapturedStep() {
  reset();
}

void CapturedStep::reset() noexcept {
  const std::shared_ptr<CapturedPart> part = std::move(part_);
  const std::shared_ptr<RuntimeImpl> runtime = std::exchange(runtime_, {}).lock();
  if (part == nullptr || runtime == nullptr) return;
  runtime->drop(part);
}

void CapturedStep::replay(int micro_batch) {
  const std::shared_ptr<RuntimeImpl> runtime = runtime_.lock();
  if (runtime == nullptr)
    fail(ErrorCode::kInvalidArgument,
         "there is nothing to replay: nothing was captured, or its runtime is gone"_message);
  const RuntimeImpl::Call call(*runtime, "replay()");
  runtime->replay(*part_, micro_batch);
}

size_t CapturedStep::operations() const {
  return part_ == nullptr ? 0 : part_->operations.operations();
}

}  // namespace tessera::etp
