#include "etp/gather_memory.h"

#include <cstring>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/mutation.h"
#include "layout/text_reader.h"

namespace tessera::etp {
namespace {

constexpr Duration kLastReaders = std::chrono::seconds(60);

std::vector<BufferKey> keys_of(std::span<Parameter* const> weights, Plane used) {
  std::vector<BufferKey> keys;
  keys.reserve(weights.size());
  for (const Parameter* p : weights) keys.push_back(buffer_key(*p, used));
  return keys;
}

Stamp unpublished(const Parameter& p, Plane used) {
  return {.weight = p.weight.id,
          .version = 0,
          .plane = used,
          .dtype = p.weight.compute,
          .stack = p.first_expert != nullptr};
}

}  // namespace

BufferKey buffer_key(const Parameter& p, Plane used) {
  const ShardedWeight& weight = p.weight;
  const bool decodes = weight.format.quantised() || weight.format.dtype() != weight.compute;
  BufferKey key = gather_key(weight.sharding.padded, weight.columns(), weight.format, used,
                             decodes ? std::optional(weight.compute) : std::nullopt);
  key.expert = p.experts == 0 || p.in_stack ? -1 : static_cast<int32_t>(p.expert_index);
  key.chain = weight.chain;
  return key;
}

GatherCost gather_cost(std::span<const Parameter* const> buffers, bool experts, BufferKeys& keys) {
  GatherCost cost{.chain = buffers.front()->weight.chain, .experts = experts};
  for (const Parameter* p : buffers) {
    if (p->weight.no_gather || (p->weight.mapped && !experts)) continue;
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      if (plane == Plane::kColumn && !p->weight.format.planes().column) continue;
      const BufferKey key = buffer_key(*p, plane);
      (plane == Plane::kRow ? cost.row : cost.column).push_back({.key = keys.index_of(key), .bytes = key.bytes()});
    }
  }
  return cost;
}

Stamp stamp_of(const Parameter& p, Plane used) {
  Stamp stamp = unpublished(p, used);
  stamp.version = version_of(p);
  return stamp;
}

GatherMemory::GatherMemory(std::shared_ptr<const void> keeper, device::Device& device,
                           std::shared_ptr<device::Stream> compute, const Options& options)
    : keeper_(std::move(keeper)),
      device_(device),
      options_(options),
      compute_(std::move(compute)),
      // The cache calls these under mutex_, which the analysis does not see.
      cache_(
          {.allocate =
               [this](int64_t bytes) NO_THREAD_SAFETY_ANALYSIS {
                 device::Buffer buffer =
                     device_.allocate(device::BufferKind::kPrivate, static_cast<size_t>(bytes), "gathered weights");
                 std::byte* const data = buffer.data();
                 buffers_.emplace(data, std::move(buffer));
                 return data;
               },
           .free =
               [this](std::byte* memory, int64_t, const LastReader& last) NO_THREAD_SAFETY_ANALYSIS {
                 freed_.push_back({.buffer = std::move(buffers_.extract(memory).mapped()), .pooled = {}, .last = last});
               }},
          options.cap_bytes) {}

GatherMemory::~GatherMemory() {
  {
    const MutexLock lock(mutex_);
    cache_.clear();
  }
  let_go_quietly();
}

void GatherMemory::let_go() {
  std::vector<Freed> freed;
  {
    const MutexLock lock(mutex_);
    freed.swap(freed_);
  }
  for (; !freed.empty(); freed.pop_back()) {
    if (freed.back().last == nullptr) continue;
    const device::Event& last = *std::static_pointer_cast<device::Event>(freed.back().last);
    try {
      device_.wait_host(last, Deadline::after(kLastReaders));
    } catch (...) {
      if (last.done()) continue;  // that it failed has been told where it matters
      const MutexLock lock(mutex_);
      freed_.insert(freed_.end(), std::make_move_iterator(freed.begin()), std::make_move_iterator(freed.end()));
      throw;
    }
  }
}

void GatherMemory::let_go_quietly() noexcept {
  try {
    let_go();
  } catch (...) {  // freed later, or with this
  }
}

void GatherMemory::make_room(std::span<Parameter* const> weights, Plane used, bool for_capture) {
  if (!options_.cap_bytes) return;
  const std::vector<BufferKey> keys = keys_of(weights, used);
  {
    const MutexLock lock(mutex_);
    cache_.make_room(keys, for_capture);
    if (freed_.empty()) return;
  }
  let_go();
}

bool GatherMemory::fits_capture(std::span<Parameter* const> weights, Plane used) {
  if (!options_.cap_bytes) return true;
  const std::vector<BufferKey> keys = keys_of(weights, used);
  const MutexLock lock(mutex_);
  return cache_.fits_capture(keys);
}

uint32_t& GatherMemory::first_idle(WeightId weight, bool stack, Plane used) {
  auto& first = first_idle_.at(stack ? 1 : 0);
  if (first.size() <= weight) first.resize(weight + 1, {kNone, kNone});
  return first[weight].at(static_cast<size_t>(used));
}

uint32_t GatherMemory::idle_slot(const Parameter& p, Plane used) {
  if (const uint32_t first = first_idle(p.weight.id, p.first_expert != nullptr, used); first != kNone) return first;
  const auto index = static_cast<uint32_t>(slots_.size());
  slots_.push_back(
      {.ticket = cache_.reserve(buffer_key(p, used), p.name()), .stamp = unpublished(p, used), .weight = p.name()});
  become_idle(index);
  return index;
}

void GatherMemory::leave_idle(uint32_t index) {
  const Slot& slot = slots_[index];
  first_idle(slot.stamp.weight, slot.stamp.stack, slot.stamp.plane) = slot.next_idle;
}

void GatherMemory::become_idle(uint32_t index) {
  Slot& slot = slots_[index];
  slot.reserved = slot.forgotten = false;
  slot.next_idle = std::exchange(first_idle(slot.stamp.weight, slot.stamp.stack, slot.stamp.plane), index);
}

void GatherMemory::take(std::span<Parameter* const> weights, Plane used, StateStep step,
                        std::span<const uint32_t> reserved, std::vector<Taken>& taken) {
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  for (size_t i = 0; i < weights.size(); ++i) {
    const Parameter& p = *weights[i];
    if (!reserved.empty()) {
      taken.push_back(lend(reserved[i], p, used, step));
      continue;
    }
    const uint32_t index = idle_slot(p, used);
    taken.push_back(lend(index, p, used, step));
    leave_idle(index);
  }
}

GatherMemory::Taken GatherMemory::lend(uint32_t index, const Parameter& p, Plane used, StateStep step) {
  Slot& slot = slots_[index];
  LentBuffer lent = cache_.get(slot.ticket);
  if (mutated(Mutation::kNeighboursShareBuffer) && slots_.size() > 1)
    for (const Slot& other : slots_)
      if (other.state.state() != WeightState::kNone && other.bytes == lent.bytes) lent.memory = other.data;
  slot.data = lent.memory;
  slot.bytes = lent.bytes;
  slot.stamp = stamp_of(p, used);
  slot.weight = p.name();
  slot.state.apply(step, slot.weight, "acquire");
  const int64_t used_bytes = bytes_of(p.weight.compute, p.weight.spec.rows * p.weight.columns());
  Taken taken{.slot = index, .data = lent.memory, .last_reader = {}, .padding = {}};
  int64_t& written = cache_.written(slot.ticket);
  if (written > used_bytes) taken.padding = {lent.memory + used_bytes, static_cast<size_t>(written - used_bytes)};
  written = used_bytes;
  if (lent.wait_for != nullptr && !mutated(Mutation::kNoWriteAfterRead)) {
    const auto& last = *std::static_pointer_cast<device::Event>(lent.wait_for);
    // A failed one is over, and its failure is told elsewhere: it must not poison this gather.
    if (!last.done() || last.status().ok()) taken.last_reader = last;
  }
  return taken;
}

void GatherMemory::arrive(std::span<const uint32_t> slots) {
  const MutexLock lock(mutex_);
  for (const uint32_t index : slots) slots_[index].state.apply(StateStep::kArrive, slots_[index].weight, "acquire");
}

WeightState GatherMemory::state_of(WeightId weight) const {
  const MutexLock lock(mutex_);
  for (const Slot& slot : slots_)
    if (slot.stamp.weight == weight && slot.state.state() != WeightState::kNone) return slot.state.state();
  return WeightState::kNone;
}

WeightState GatherMemory::state(uint32_t index) const {
  const MutexLock lock(mutex_);
  return slots_[index].state.state();
}

void GatherMemory::use(std::span<const uint32_t> slots, std::span<Parameter* const> weights, Plane used, bool noted) {
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = slots_[slots[i]];
    check_stamp(slot, stamp_of(*weights[i], used));
    if (noted) note_read("acquire", slot);
  }
}

void GatherMemory::check_stamp(const Slot& slot, const Stamp& wanted) const {
  const Stamp& held = slot.stamp;
  if (held == wanted || mutated(Mutation::kStampNotCompared)) return;
  fail_internal("{}: version {} of the {} plane as {} is wanted, and the buffer holds version {} of weight {}, {}, {}",
                tessera::quoted(slot.weight), wanted.version, to_string(wanted.plane), to_string(wanted.dtype),
                held.version, held.weight, to_string(held.plane), to_string(held.dtype));
}

void GatherMemory::give(uint32_t index, LastReader last) {
  Slot& slot = slots_[index];
  cache_.release(slot.ticket, std::move(last));
  if (!slot.reserved) become_idle(index);
}

void GatherMemory::note_read(const char* name, const Slot& slot) {
  if (!device_.recorder().on() || compute_ == nullptr || !compute_->runs_inline()) return;
  const device::Access read =
      device::read_of(slot.data, static_cast<size_t>(cache_.written(slot.ticket)), slot.stamp.version);
  device_.recorder().host_access(name, slot.weight, {&read, 1});
}

void GatherMemory::release(uint32_t index) noexcept {
  std::function<void(uint32_t)> released;
  try {
    {
      const MutexLock lock(mutex_);
      Slot& slot = slots_[index];
      if (slot.forgotten) {
        slot.state.reset();
        become_idle(index);
      } else if (slot.reserved && captured_release_) {
        slot.state.apply(StateStep::kRelease, slot.weight, "release");
        released = captured_release_;
      } else {
        give_back(index);
      }
      if (freed_.empty() && !released) return;
    }
    if (released) released(index);
  } catch (...) {
    const MutexLock lock(mutex_);
    failure_ = std::current_exception();
  }
  let_go_quietly();
}

void GatherMemory::give_back(uint32_t index) {
  Slot& slot = slots_[index];
  note_read("release", slot);
  slot.state.apply(StateStep::kRelease, slot.weight, "release");
  LastReader last;
  if (compute_ != nullptr && !compute_->runs_inline()) {
    last = std::make_shared<device::Event>(captured_release_ ? before_capture_ : compute_->record());
  } else if (options_.poison) {
    std::memset(slot.data, 0xff, static_cast<size_t>(slot.bytes));
    cache_.written(slot.ticket) = slot.bytes;
  }
  give(index, std::move(last));
}

void GatherMemory::drop(uint32_t index, const device::Event& arrives) {
  const MutexLock lock(mutex_);
  Slot& slot = slots_[index];
  slot.state.apply(StateStep::kArrive, slot.weight, "drop");
  slot.state.apply(StateStep::kRelease, slot.weight, "drop");
  give(index, std::make_shared<device::Event>(arrives));
}

void GatherMemory::begin_capture(device::Event before, std::function<void(uint32_t slot)> released) {
  const MutexLock lock(mutex_);
  before_capture_ = std::move(before);
  captured_release_ = std::move(released);
}

void GatherMemory::end_capture() {
  const MutexLock lock(mutex_);
  before_capture_ = {};
  captured_release_ = {};
}

GatherMemory::Reserved GatherMemory::reserve(const Parameter& p, Plane used) {
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  const uint32_t index = idle_slot(p, used);
  Slot& slot = slots_[index];
  const LentBuffer lent = cache_.capture(slot.ticket);
  leave_idle(index);
  slot.data = lent.memory;
  slot.bytes = lent.bytes;
  slot.stamp = unpublished(p, used);
  slot.reserved = true;
  slot.state.apply(StateStep::kRunNow, p.name(), "acquire");
  return {.slot = index, .data = lent.memory};
}

void GatherMemory::put_back(uint32_t index) {
  const MutexLock lock(mutex_);
  cache_.put_back(slots_[index].ticket);
}

bool GatherMemory::is_free(uint32_t index) const {
  const MutexLock lock(mutex_);
  return cache_.is_free(slots_[index].ticket);
}

void GatherMemory::recover(uint32_t index, const device::Event& last) {
  const MutexLock lock(mutex_);
  Slot& slot = slots_[index];
  slot.state.reset();
  if (cache_.holds(slot.ticket)) cache_.release(slot.ticket, std::make_shared<device::Event>(last));
}

void GatherMemory::forget(uint32_t index) {
  const MutexLock lock(mutex_);
  Slot& slot = slots_[index];
  cache_.uncapture(slot.ticket);
  if (cache_.holds(slot.ticket)) cache_.put_back(slot.ticket);
  slot.forgotten = slot.state.state() != WeightState::kNone;
  if (!slot.forgotten) become_idle(index);
}

void GatherMemory::reallocate(BufferMemory pool) {
  // Freed without mutex_, and yet not while another call allocates.
  struct Serial {
    BufferMemory pool;
    Mutex mutex;
  };
  const auto serial = std::make_shared<Serial>(std::move(pool));
  {
    const MutexLock lock(mutex_);
    cache_.reallocate({.allocate =
                           [serial](int64_t bytes) {
                             const MutexLock call(serial->mutex);
                             return serial->pool.allocate(bytes);
                           },
                       .free =
                           [this, serial](std::byte* memory, int64_t bytes, const LastReader& last)
                               NO_THREAD_SAFETY_ANALYSIS {
                                 const auto free = [serial, bytes](std::byte* data) {
                                   const MutexLock call(serial->mutex);
                                   serial->pool.free(data, bytes, nullptr);
                                 };
                                 freed_.push_back({.buffer = {}, .pooled = {memory, free}, .last = last});
                               }});
  }
  let_go();
}

int64_t GatherMemory::end_step() {
  int64_t bytes = 0;
  {
    const MutexLock lock(mutex_);
    bytes = cache_.end_step();
  }
  let_go();
  return bytes;
}

void GatherMemory::close() {
  {
    const MutexLock lock(mutex_);
    compute_.reset();
    cache_.clear();
  }
  let_go_quietly();
}

int64_t GatherMemory::kept_bytes() const {
  const MutexLock lock(mutex_);
  return cache_.kept_bytes();
}

CacheReport GatherMemory::report() const {
  const MutexLock lock(mutex_);
  return cache_.report();
}

}  // namespace tessera::etp
