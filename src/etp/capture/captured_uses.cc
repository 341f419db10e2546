// Uses of weights in captures, and in their replays.
#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "etp/consumption.h"
#include "layout/text_reader.h"

namespace tessera::etp {

void Consumptions::capture(std::span<Parameter* const> weights, Phase phase, const Use& use, std::span<FullWeight> out,
                           CapturedPart& part) {
  const uint32_t index = unit_of(weights);
  Unit& unit = units_[index];
  const Parameter& first = *weights.front();
  if (unit.chain != Chain::kGraphed)
    fail(ErrorCode::kInvalidArgument,
         "{} is of the {} chain: use it outside of the capture, or put what it belongs to into graph_scope"_message,
         tessera::quoted(first.name()), to_string(unit.chain));
  if (use.first_micro_batch || use.version)
    fail(ErrorCode::kInvalidArgument, "{}: a captured use has another {} in each replay: leave it out, {}"_message,
         tessera::quoted(first.name()), use.version ? "version" : "first micro-batch",
         use.version ? "and update after the backward" : "and publish() the weights before the first replay");
  unit.used = true;
  CapturedUse& made = part.uses.emplace_back();
  made.unit = index;
  made.plane = first.weight.format.gathered(phase == Phase::kBackward ? Plane::kColumn : Plane::kRow);
  made.phase = phase;
  made.micro_batch = use.micro_batch;
  made.expects_backward = use.expects_backward;
  if (first.weight.no_gather) {
    for (size_t i = 0; i < unit.buffers.size(); ++i) use_in_place(*unit.buffers[i], out[i]);
  } else {
    reserve(out, made, part);
  }
  const MutexLock lock(part.mutex);
  part.recorded = part.uses.size();
}

// A buffer that was released is used again only so many uses later, so that there is one to gather ahead into; sooner
// where others do not fit below the cap.
void Consumptions::reserve(std::span<FullWeight> out, CapturedUse& use, CapturedPart& part) {
  const Unit& unit = units_[use.unit];
  const size_t before = part.uses.size() - 1;
  size_t free_before = part.uses.size() - std::min(static_cast<size_t>(reach(unit)), part.uses.size());
  put_back_released(part, free_before);
  const auto fits = [&] { return memory_->fits_capture(unit.buffers, use.plane); };
  if (!fits()) give_up_prefetches(unit.chain);
  while (!fits() && free_before <= before) put_back_released(part, ++free_before);
  memory_->make_room(unit.buffers, use.plane, true);
  for (size_t i = 0; i < unit.buffers.size(); ++i) {
    const GatherMemory::Reserved reserved = memory_->reserve(*unit.buffers[i], use.plane);
    use.slots.push_back(reserved.slot);
    out[i] = full_weight(*unit.buffers[i], reserved.slot, reserved.data);
  }
}

// Below the cap, what is gathered ahead makes way for a capture, most likely of the same uses.
void Consumptions::give_up_prefetches(Chain chain) {
  for (InFlight& gathering : in_flight_) {
    const Unit& unit = units_[gathering.use.weight];
    if (gathering.slots.empty() || unit.chain != chain) continue;
    gathering.needed_cap = memory_->kept_bytes() + predictor_.costs()[gathering.use.weight].bytes(gathering.use.plane);
    for (const uint32_t slot : gathering.slots) memory_->drop(slot, gathering.arrives);
    keep_list(std::exchange(gathering.slots, {}));
  }
}

// What was released after fewer uses than `before`.
void Consumptions::put_back_released(CapturedPart& part, size_t before) {
  const MutexLock lock(part.mutex);
  std::erase_if(part.released, [&](const CapturedPart::Released& released) {
    if (released.after >= before) return false;
    memory_->put_back(released.slot);
    return true;
  });
}

void Consumptions::end_capture(CapturedPart& part) {
  put_back_released(part, SIZE_MAX);
  if (part.failure != nullptr) std::rethrow_exception(part.failure);
  for (const CapturedUse& use : part.uses)
    for (size_t i = 0; i < use.slots.size(); ++i)
      if (memory_->state(use.slots[i]) != WeightState::kNone)
        fail(ErrorCode::kInvalidArgument, "{} is still held when its capture ends: release it inside"_message,
             tessera::quoted(units_[use.unit].buffers[i]->name()));
}

void Consumptions::forget(CapturedPart& part) {
  for (const CapturedUse& use : part.uses)
    for (const uint32_t slot : use.slots) memory_->forget(slot);
  part.uses.clear();
}

void Consumptions::begin_replay(CapturedPart& part) {
  for (const CapturedUse& use : part.uses)
    for (const Parameter* p : units_[use.unit].weights)
      if (p->publication.stale)
        fail(ErrorCode::kInvalidArgument,
             "{} was updated and is not published: publish() it before a capture that uses it is replayed"_message,
             tessera::quoted(p->name()));
  predictor_.replayed(Chain::kGraphed);
  part.acquired = part.next_gather = 0;
  gather_ahead(part);
}

void Consumptions::gather_ahead(CapturedPart& part) {
  for (; part.next_gather < part.uses.size(); ++part.next_gather) {
    CapturedUse& use = part.uses[part.next_gather];
    Unit& unit = units_[use.unit];
    if (part.next_gather >= part.acquired + static_cast<size_t>(reach(unit))) return;
    if (!std::ranges::all_of(use.slots, [this](uint32_t slot) { return memory_->is_free(slot); })) return;
    if (use.slots.empty()) continue;
    use.issued = Clock::steady().now();
    use.arrives = start_gather(unit, use.plane, use.slots);
  }
}

void Consumptions::replay_use(CapturedPart& part, size_t index) {
  CapturedUse& use = part.uses[index];
  Unit& unit = units_[use.unit];
  ++context_.counters.consumptions;
  if (use.slots.empty()) {
    for (const Parameter* p : unit.buffers) note_use_in_place(*p);
  } else {
    Exposure exposure{.weight = unit.weights.front()->weight.id,
                      .phase = use.phase,
                      .micro_batch = use.micro_batch + part.micro_batch};
    if (part.next_gather > index) {
      await_gather(unit, use.arrives, use.issued, exposure);
      memory_->arrive(use.slots);
    } else {
      ++context_.counters.on_demand;
      exposure.began = Clock::steady().now();
      exposure.cause = !predictor_.options().weight_prefetch ? ExposureCause::kOff
                       : reach(unit) > 0                     ? ExposureCause::kCap
                                                             : ExposureCause::kNotSeen;
      gather_now(unit, use.plane, use.slots);
    }
    note_exposure(exposure, use.unit, use.plane);
    memory_->use(use.slots, unit.buffers, use.plane, part.next_gather > index);
  }
  part.acquired = index + 1;
  part.next_gather = std::max(part.next_gather, part.acquired);
  gather_ahead(part);
}

void Consumptions::replay_release(CapturedPart& part, uint32_t slot) {
  memory_->release(slot);
  gather_ahead(part);
}

void Consumptions::recover(CapturedPart& part) {
  device::Stream& compute = *context_.compute;
  for (size_t i = 0; i < part.uses.size(); ++i) {
    CapturedUse& use = part.uses[i];
    const device::Event last = i < part.acquired && !compute.runs_inline() ? compute.record() : use.arrives;
    for (const uint32_t slot : use.slots) memory_->recover(slot, last);
    use.arrives = {};
  }
  static_cast<void>(context_.streams.gather(Chain::kGraphed).take_error());
}

}  // namespace tessera::etp
