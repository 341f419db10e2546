#include <array>
#include <new>
#include <tuple>
#include <utility>

#include "base/mutation.h"
#include "etp/runtime_impl.h"
#include "tessera/etp.h"

namespace tessera::etp {

FullWeight::FullWeight(FullWeight&& other) noexcept {
  *this = std::move(other);
}

FullWeight& FullWeight::operator=(FullWeight&& other) noexcept {
  if (this == &other) return *this;
  release();
  memory_ = std::move(other.memory_);
  keeper_ = std::move(other.keeper_);
  data_ = std::exchange(other.data_, nullptr);
  slot_ = other.slot_;
  dtype_ = other.dtype_;
  rows_ = other.rows_;
  columns_ = other.columns_;
  version_ = other.version_;
  return *this;
}

FullWeight::~FullWeight() {
  release();
}

void FullWeight::release() noexcept {
  if (memory_ != nullptr) memory_->release(slot_);
  memory_.reset();
  keeper_.reset();
  data_ = nullptr;
}

GradientBuffer::GradientBuffer(GradientBuffer&& other) noexcept {
  *this = std::move(other);
}

GradientBuffer& GradientBuffer::operator=(GradientBuffer&& other) noexcept {
  if (this == &other) return *this;
  if (pool_ != nullptr) pool_->release(entry_);
  pool_ = std::move(other.pool_);
  data_ = std::exchange(other.data_, nullptr);
  entry_ = other.entry_;
  weight_ = other.weight_;
  micro_batch_ = other.micro_batch_;
  dtype_ = other.dtype_;
  rows_ = other.rows_;
  columns_ = other.columns_;
  return *this;
}

GradientBuffer::~GradientBuffer() {
  if (pool_ != nullptr) pool_->release(entry_);
}

Runtime::Runtime(ShardGroup group, RuntimeOptions options)
    : impl_(std::make_shared<RuntimeImpl>(std::move(group), std::move(options))) {}

Runtime::~Runtime() {
  // A forked child has neither the threads nor the pages: nothing is destroyed there.
  if (!impl_->in_own_process()) std::ignore = new (std::nothrow) std::shared_ptr<RuntimeImpl>(std::move(impl_));
}

void Runtime::close() {
  if (!impl_->in_own_process()) return;
  const MutexLock lock(impl_->mutex_);
  impl_->close();
}

WeightId Runtime::add(const WeightSpec& spec) {
  const RuntimeImpl::Call call(*impl_, "add()");
  return impl_->add(spec);
}

void Runtime::add_experts(std::span<const WeightId> experts) {
  const RuntimeImpl::Call call(*impl_, "add_experts()");
  impl_->add_experts(experts, false);
}

std::vector<WeightId> Runtime::add_stack(const WeightSpec& spec, int count) {
  const RuntimeImpl::Call call(*impl_, "add_stack()");
  return impl_->add_stack(spec, count);
}

uint32_t Runtime::add_replicated(const std::string& name, int64_t elements, DType dtype) {
  const RuntimeImpl::Call call(*impl_, "add_replicated()");
  return impl_->replicated_.add(name, elements, dtype);
}

void Runtime::start() {
  const RuntimeImpl::Call call(*impl_, "start()");
  impl_->start();
}

WeightSpec Runtime::spec(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->context_.parameter(weight).weight.spec;
}

bool Runtime::is_mapped(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->context_.parameter(weight).weight.mapped;
}

RowRange Runtime::rows(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  const ShardedWeight& w = impl_->context_.parameter(weight).weight;
  if (mutated(Mutation::kPaddingInLogicalRows))
    return {.begin = w.rows.begin, .end = w.rows.begin + w.sharding.per_rank};
  return w.rows;
}

int64_t Runtime::shard_rows(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->context_.parameter(weight).weight.sharding.per_rank;
}

int64_t Runtime::version(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return static_cast<int64_t>(impl_->context_.parameter(weight).publication.version);
}

WeightStatus Runtime::status(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->status(weight);
}

std::byte* Runtime::shard(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->context_.parameter(weight).shard->data();
}

std::shared_ptr<void> Runtime::shard_keeper(WeightId weight) const {
  const RuntimeImpl::Call call(*impl_);
  struct Kept {
    std::shared_ptr<const void> device;
    std::shared_ptr<device::Buffer> shard;
  };
  return std::make_shared<Kept>(Kept{impl_->group_.keeper(), impl_->context_.parameter(weight).shard});
}

std::shared_ptr<const QuantizedCopy> Runtime::quantized_copy(std::span<const WeightId> weights) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->quantized_copy(weights);
}

void Runtime::set_master(WeightId weight, const void* rows, DType dtype) {
  const RuntimeImpl::Call call(*impl_, "set_master()");
  impl_->set_master(weight, rows, dtype);
}

void Runtime::read_rows(WeightId weight, void* to, DType dtype) const {
  const RuntimeImpl::Call call(*impl_);
  impl_->read_rows(weight, to, dtype);
}

void Runtime::set_gradient(WeightId weight, void* rows, DType dtype, bool empty) {
  const RuntimeImpl::Call call(*impl_, "set_gradient()");
  impl_->set_gradient(weight, rows, dtype, empty);
}

void* Runtime::gradient(WeightId weight) {
  const RuntimeImpl::Call call(*impl_);
  return impl_->gradient(weight);
}

void Runtime::zero_gradients() {
  const RuntimeImpl::Call call(*impl_, "zero_gradients()");
  impl_->zero_gradients();
}

void Runtime::set_frozen(WeightId weight, bool frozen) {
  const RuntimeImpl::Call call(*impl_, "set_frozen()");
  impl_->set_frozen(weight, frozen);
}

void Runtime::classify(const std::set<std::string>& graph_scope, bool moe_shared_expert_overlap) {
  const RuntimeImpl::Call call(*impl_, "classify()");
  impl_->classify(graph_scope, moe_shared_expert_overlap);
}

void Runtime::remove(std::span<const WeightId> weights) {
  const RuntimeImpl::Call call(*impl_, "remove()");
  impl_->remove(weights);
}

FullWeight Runtime::acquire(WeightId weight, Phase phase, const Use& use) {
  const RuntimeImpl::Call call(*impl_);
  FullWeight full;
  impl_->acquire({&weight, 1}, phase, use, {&full, 1});
  return full;
}

std::vector<FullWeight> Runtime::acquire(std::span<const WeightId> experts, Phase phase, const Use& use) {
  const RuntimeImpl::Call call(*impl_);
  std::vector<FullWeight> full(experts.size());
  impl_->acquire(experts, phase, use, full);
  std::erase_if(full, [](const FullWeight& each) { return !each; });
  return full;
}

GradientBuffer Runtime::gradient_buffer(WeightId weight, int micro_batch) {
  const RuntimeImpl::Call call(*impl_);
  return impl_->gradient_buffer(weight, micro_batch);
}

void Runtime::produce(GradientBuffer gradient, bool own_round) {
  const RuntimeImpl::Call call(*impl_);
  impl_->produce({&gradient, 1}, own_round);
}

void Runtime::produce(std::span<GradientBuffer> experts) {
  const RuntimeImpl::Call call(*impl_);
  impl_->produce(experts, true);
}

void Runtime::give_replicated(uint32_t replicated, const void* gradient, void* accumulated, DType accumulated_dtype) {
  const RuntimeImpl::Call call(*impl_, "give_replicated()");
  impl_->replicated_.give(replicated, gradient, accumulated, accumulated_dtype);
}

std::vector<int> Runtime::replicated_ranks() const {
  const RuntimeImpl::Call call(*impl_, "replicated_ranks()");
  return impl_->replicated_.ranks();
}

std::vector<Added> Runtime::added() {
  const RuntimeImpl::Call call(*impl_);
  return impl_->gradients_.added();
}

std::vector<Added> Runtime::drain() {
  const RuntimeImpl::Call call(*impl_, "drain()");
  return impl_->drain();
}

bool Runtime::abandon(bool lost) {
  const RuntimeImpl::Call call(*impl_, "abandon()");
  return impl_->abandon(lost);
}

void Runtime::begin_update(std::span<const WeightId> weights, const UpdateOptions& options) {
  const RuntimeImpl::Call call(*impl_, "begin_update()");
  impl_->begin_update(weights, options);
}

void Runtime::end_update() {
  const RuntimeImpl::Call call(*impl_, "end_update()");
  impl_->end_update();
}

std::vector<std::string> Runtime::begin_write(std::span<const WeightId> weights, std::string told,
                                              const UpdateOptions& options, bool begins) {
  const RuntimeImpl::Call call(*impl_, "begin_write()");
  return impl_->begin_write(weights, std::move(told), options, begins);
}

void Runtime::end_write() {
  const RuntimeImpl::Call call(*impl_, "end_write()");
  impl_->end_write();
}

void Runtime::next_step() {
  const RuntimeImpl::Call call(*impl_, "next_step()");
  impl_->next_step();
}

void Runtime::publish(std::span<const WeightId> weights, const float* noop) {
  const RuntimeImpl::Call call(*impl_, "publish()");
  impl_->publish(weights, noop);
}

std::vector<StreamInfo> Runtime::streams() const {
  const RuntimeImpl::Call call(*impl_, "streams()");
  return impl_->context_.streams.infos();
}

void Runtime::synchronize(std::string_view chain, bool gathers) {
  const RuntimeImpl::Call call(*impl_, "synchronize()");
  const std::optional<Chain> named = chain.empty() ? std::nullopt : std::optional(parse_chain(chain));
  impl_->context_.streams.synchronize(named, gathers, impl_->context_.group.deadline());
}

RuntimeReport Runtime::report() const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->report();
}

RuntimeForecast Runtime::forecast() const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->forecast();
}

std::string Runtime::explain(int64_t step) const {
  const RuntimeImpl::Call call(*impl_);
  return impl_->explain(step);
}

CapturedStep Runtime::capture(const std::function<void()>& part) {
  CapturedStep step;
  {
    const RuntimeImpl::Call call(*impl_, "capture()");
    step.part_ = impl_->begin_capture();
    step.runtime_ = impl_;
  }
  try {
    part();
  } catch (...) {
    const MutexLock lock(impl_->mutex_);
    impl_->end_capture(false);
    throw;
  }
  const MutexLock lock(impl_->mutex_);
  impl_->end_capture(true);
  return step;
}

void Runtime::reallocate(CapturePool pool) {
  const RuntimeImpl::Call call(*impl_, "reallocate()");
  impl_->reallocate(std::move(pool));
}

}  // namespace tessera::etp
