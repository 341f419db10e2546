#include "etp/consumption.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/fail.h"
#include "base/mutation.h"
#include "collective/movement/gather.h"
#include "etp/schedule/planned_order.h"
#include "layout/text_reader.h"

namespace tessera::etp {

PrefetchOptions prefetch_options(const RuntimeOptions& options) {
  return {.weight_prefetch = options.prefetch == PrefetchMode::kOn,
          .distance = options.distance,
          .expert_distance = options.expert_distance,
          .cap_bytes = options.cap_bytes};
}

Consumptions::Consumptions(RuntimeContext& context, std::shared_ptr<GatherMemory> memory,
                           std::shared_ptr<WeightView::Shared> views)
    : context_(context),
      memory_(std::move(memory)),
      views_(std::move(views)),
      predictor_(prefetch_options(context.options)) {}

GatherCost Consumptions::cost_of(const Unit& unit) {
  return gather_cost(unit.buffers, unit.weights.size() > 1, keys_);
}

void Consumptions::add(Parameter& p) {
  TESSERA_CHECK_EQ(unit_of_weight_.size(), static_cast<size_t>(p.weight.id));
  units_.push_back({.weights = {&p}, .buffers = {&p}, .chain = p.weight.chain});
  unit_of_weight_.push_back(predictor_.add(cost_of(units_.back())));
}

void Consumptions::add_experts(std::span<Parameter* const> experts, Parameter* whole) {
  Unit unit{.weights = {experts.begin(), experts.end()}, .buffers = {}, .chain = experts.front()->weight.chain};
  if (whole == nullptr)
    unit.buffers = unit.weights;
  else
    unit.buffers = {whole};
  units_.push_back(std::move(unit));
  unit_of_experts_.push_back(predictor_.add(cost_of(units_.back())));
}

void Consumptions::rebuild() {
  begin_update();
  std::vector<GatherCost> costs;
  for (Unit& unit : units_) {
    unit.chain = unit.weights.front()->weight.chain;
    for (Parameter* p : unit.buffers) p->weight.chain = unit.chain;
    costs.push_back(cost_of(unit));
  }
  predictor_ = Predictor(prefetch_options(context_.options), std::move(costs));
  refused_ = 0;
}

void Consumptions::remove(std::span<Parameter* const> weights) {
  stop_reading();
  detach(weights);
  for (Parameter* p : weights) {
    units_[unit_of_weight_[p->weight.id]].ready.clear();
    p->view = nullptr;
  }
}

uint32_t Consumptions::unit_of(std::span<Parameter* const> weights) const {
  const Parameter& first = *weights.front();
  if (weights.size() == 1) return unit_of_weight_[first.weight.id];
  if (first.experts != 0) {
    const uint32_t unit = unit_of_experts_[first.experts - 1];
    if (std::ranges::equal(units_[unit].weights, weights)) return unit;
  }
  fail(ErrorCode::kInvalidArgument,
       "{} and {} more are used as a list that add_experts() has not been given: use its list, in its order"_message,
       tessera::quoted(first.name()), weights.size() - 1);
}

void Consumptions::prepare(const Parameter& p, Plane plane, const GatherMemory::Taken& taken, device::Stream& stream) {
  if (addresses_.size() <= taken.slot) addresses_.resize(taken.slot + 1);
  addresses_[taken.slot] = taken.data;
  stream.wait(taken.last_reader);
  if (!taken.padding.empty())
    stream.enqueue({.name = "pad",
                    .subject = p.name(),
                    .accesses = {device::write_of(taken.padding.data(), taken.padding.size())},
                    .body = [padding = taken.padding] { std::ranges::fill(padding, std::byte{0}); }});
  context_.counters.bytes_gathered += p.wire_bytes[static_cast<size_t>(plane)];
}

collective::GatherPart Consumptions::part_of(const Parameter& p, Plane plane, std::byte* to) const {
  const ShardedWeight& w = p.weight;
  return {
      .slot = w.id,
      .version = p.publication.version,
      .from = p.publication.of(plane),
      .to = {.data = to, .dtype = w.compute, .rows = w.spec.rows, .columns = w.columns(), .row_stride = w.columns()},
      .weight = p.name()};
}

void Consumptions::gather(Unit& unit, Plane plane, device::Stream& stream, StateStep step,
                          std::vector<uint32_t>& slots) {
  if (slots.empty()) memory_->make_room(unit.buffers, plane);
  taken_.clear();
  memory_->take(unit.buffers, plane, step, slots, taken_);
  const bool reserved = !slots.empty();
  for (size_t i = 0; i < taken_.size(); ++i) {
    prepare(*unit.buffers[i], plane, taken_[i], stream);
    if (!reserved) slots.push_back(taken_[i].slot);
  }
  if (unit.weights.size() > 1) {
    std::vector<collective::GatherPart> parts;
    parts.reserve(unit.weights.size());
    std::byte* next = taken_.front().data;  // of a stack
    for (size_t i = 0; i < unit.weights.size(); ++i) {
      const ShardedWeight& w = unit.weights[i]->weight;
      const bool stacked = unit.buffers.size() < unit.weights.size();
      parts.push_back(part_of(*unit.weights[i], plane, stacked ? next : taken_[i].data));
      next += bytes_of(w.compute, w.spec.rows * w.columns());
    }
    collective::gather(context_.group, stream, std::move(parts), is_small(unit, plane));
    return;
  }
  for (const auto& operation : ready_gather(unit, plane, taken_.front().data)) stream.enqueue(operation);
}

const Consumptions::Operations& Consumptions::ready_gather(Unit& unit, Plane plane, std::byte* to) {
  const Parameter& p = *unit.weights.front();
  const uint64_t version = p.publication.version;
  const auto found = std::ranges::find_if(unit.ready, [&](const ReadyGather& ready) {
    return (ready.to == to || mutated(Mutation::kCapturedAddressReused)) && ready.plane == plane;
  });
  if (found != unit.ready.end()) {
    if (found->version == version || !context_.device.recorder().on()) return found->operations;
    unit.ready.erase(found);  // its record would tell of an earlier version
  }
  collective::GatherPart part = part_of(p, plane, to);
  part.version_now = &p.publication.version;
  if (unit.ready.size() >= kReadyGathers) unit.ready.erase(unit.ready.begin());
  unit.ready.push_back(
      {to, plane, version, collective::gather_operations(context_.group, {&part, 1}, is_small(unit, plane))});
  return unit.ready.back().operations;
}

int Consumptions::unpublished_owner(const Unit& unit) const {
  for (const Parameter* p : unit.weights)
    for (int q = 0; q < context_.ranks(); ++q)
      if (p->weight.reads(q) &&
          context_.group.get(q, collective::Word::kPublished, p->weight.id) < p->publication.version)
        return q;
  return -1;
}

void Consumptions::await_published(const Unit& unit) {
  for (const Parameter* p : unit.weights)
    for (int q = 0; q < context_.ranks(); ++q) {
      if (!p->weight.reads(q)) continue;
      const auto condition =
          context_.group.at_least(q, collective::Word::kPublished, p->weight.id, p->publication.version,
                                  fmt::format("to publish version {} of {}", p->publication.version, p->name()));
      context_.device.wait_host(*condition, context_.group.deadline());
    }
}

void Consumptions::gather_now(Unit& unit, Plane plane, std::vector<uint32_t>& slots) {
  device::Stream& compute = *context_.compute;
  const bool reserved = !slots.empty();
  // What the wait throws must not poison the caller's stream.
  if (compute.runs_inline() && unpublished_owner(unit) >= 0) await_published(unit);
  gather(unit, plane, compute, StateStep::kRunNow, slots);
  if (!compute.runs_inline()) return;
  const Status status = compute.take_error();
  if (status.ok()) return;
  if (!reserved) {
    for (const uint32_t slot : slots) memory_->release(slot);
    slots.clear();
  }
  status.throw_if_error();
}

bool Consumptions::is_small(const Unit& unit, Plane plane) const {
  if (unit.is_mapped()) return false;
  const GatherCost& cost = predictor_.costs()[static_cast<size_t>(&unit - units_.data())];
  return cost.bytes(plane) <= context_.options.inline_bytes;
}

device::Event Consumptions::start_gather(Unit& unit, Plane plane, std::vector<uint32_t>& slots) {
  const bool at_once = is_small(unit, plane) && !context_.options.gather_bytes_per_second &&
                       context_.compute->runs_inline() && unpublished_owner(unit) < 0;
  device::Stream& stream = at_once ? *context_.compute : context_.streams.gather(unit.chain);
  gather(unit, plane, stream, StateStep::kStart, slots);
  return stream.record();
}

void Consumptions::issue(std::span<const Prefetch> prefetches) {
  for (const Prefetch& prefetch : prefetches) {
    Unit& unit = units_[prefetch.use.weight];
    InFlight gathering;
    gathering.id = prefetch.id;
    gathering.use = prefetch.use;
    const bool stale = std::ranges::any_of(unit.weights, [](const Parameter* p) { return p->publication.stale; });
    // What is not published yet is gathered when it is used, which publishes it.
    if (!stale && !unit.is_mapped() && !unit.is_removed()) {
      gathering.needed_cap = cap_needed(prefetch.use);
      if (gathering.needed_cap == 0) {
        gathering.issued = Clock::steady().now();
        gathering.slots = idle_list();
        gathering.arrives = start_gather(unit, prefetch.use.plane, gathering.slots);
      }
    }
    in_flight_.push_back(std::move(gathering));
  }
}

int64_t Consumptions::cap_needed(const Consumption& use) {
  if (!context_.options.cap_bytes) return 0;
  const int64_t bytes = memory_->kept_bytes() + predictor_.costs()[use.weight].bytes(use.plane);
  if (bytes <= *context_.options.cap_bytes) return 0;
  ++context_.counters.refused;
  return bytes;
}

Consumptions::InFlight Consumptions::take(uint64_t id) {
  const auto found = std::ranges::find(in_flight_, id, &InFlight::id);
  TESSERA_CHECK(found != in_flight_.end());
  InFlight taken = std::move(*found);
  in_flight_.erase(found);
  return taken;
}

std::vector<uint32_t> Consumptions::idle_list() {
  if (idle_lists_.empty()) return {};
  std::vector<uint32_t> list = std::move(idle_lists_.back());
  idle_lists_.pop_back();
  return list;
}

void Consumptions::keep_list(std::vector<uint32_t> list) {
  if (list.capacity() == 0) return;
  list.clear();
  idle_lists_.push_back(std::move(list));
}

void Consumptions::drop(std::span<const uint64_t> prefetches) {
  for (const uint64_t id : prefetches) {
    InFlight dropped = take(id);
    for (const uint32_t slot : dropped.slots) memory_->drop(slot, dropped.arrives);
    keep_list(std::move(dropped.slots));
  }
}

void Consumptions::arrive(const device::Event& gathered) {
  if (mutated(Mutation::kSkippedWait)) return;
  if (context_.compute->runs_inline())
    context_.device.wait_host(gathered, context_.group.deadline());
  else
    context_.compute->wait(gathered);
}

FullWeight Consumptions::full_weight(const Parameter& p, uint32_t slot, const std::byte* data) const {
  FullWeight full;
  full.memory_ = memory_;
  full.data_ = data;
  full.slot_ = slot;
  full.dtype_ = p.weight.compute;
  full.rows_ = p.weight.spec.rows;
  full.columns_ = p.weight.columns();
  full.version_ = static_cast<int64_t>(version_of(p));
  return full;
}

ExposureCause Consumptions::cause_of(const PredictorCounters& before) const {
  if (!predictor_.options().weight_prefetch) return ExposureCause::kOff;
  if (predictor_.counters().mispredicted > before.mispredicted) return ExposureCause::kMispredicted;
  return before.refused > refused_ ? ExposureCause::kCap : ExposureCause::kNotSeen;
}

void Consumptions::take_prefetched(const Unit& unit, uint64_t id, InFlight& gathered, Exposure& exposure) {
  gathered = take(id);
  if (gathered.slots.empty()) {
    exposure.began = Clock::steady().now();
    exposure.cause = gathered.needed_cap > 0 ? ExposureCause::kCap : ExposureCause::kFirstUse;
    exposure.needed_cap = gathered.needed_cap;
    return;
  }
  try {
    await_gather(unit, gathered.arrives, gathered.issued, exposure);
  } catch (...) {
    for (const uint32_t slot : gathered.slots) memory_->drop(slot, gathered.arrives);
    static_cast<void>(context_.streams.gather(unit.chain).take_error());  // it is being told
    throw;
  }
  memory_->arrive(gathered.slots);
}

void Consumptions::await_gather(const Unit& unit, const device::Event& arrives, TimePoint issued, Exposure& exposure) {
  ++context_.counters.prefetched;
  if (!arrives.done()) {
    exposure.began = Clock::steady().now();
    exposure.publisher = unpublished_owner(unit);
    exposure.cause = exposure.publisher >= 0 ? ExposureCause::kNotPublished : ExposureCause::kUnderWay;
    exposure.head_start = to_seconds(exposure.began - issued);
  }
  arrive(arrives);
}

void Consumptions::note_exposure(Exposure& exposure, uint32_t unit, Plane plane) {
  if (exposure.began == TimePoint()) return;
  exposure.bytes = predictor_.costs()[unit].bytes(plane);
  exposure.seconds = to_seconds(Clock::steady().now() - exposure.began);
  context_.counters.exposed_seconds += exposure.seconds;
  exposures_.add(exposure);
}

void Consumptions::acquire(std::span<Parameter* const> weights, Phase phase, const Use& use,
                           std::span<FullWeight> out) {
  const uint32_t index = unit_of(weights);
  Unit& unit = units_[index];
  unit.used = true;
  ++context_.counters.consumptions;
  if (unit.weights.front()->weight.no_gather) {
    for (size_t i = 0; i < unit.buffers.size(); ++i) {
      note_use_in_place(*unit.buffers[i]);
      use_in_place(*unit.buffers[i], out[i]);
    }
    return;
  }
  const Plane plane = weights.front()->weight.format.gathered(phase == Phase::kBackward ? Plane::kColumn : Plane::kRow);
  const PredictorCounters before = predictor_.counters();
  const UseDecision decision = predictor_.observe({.weight = index,
                                                   .plane = plane,
                                                   .phase = phase,
                                                   .micro_batch = phase == Phase::kForward && !use.expects_backward
                                                                      ? kEvaluation
                                                                      : static_cast<uint32_t>(use.micro_batch)});
  drop(decision.dropped);

  InFlight gathered;
  Exposure exposure{.weight = weights.front()->weight.id, .phase = phase, .micro_batch = use.micro_batch};
  std::optional<uint64_t> taken = decision.taken;
  if (unit.is_mapped()) {
    if (taken) take(*std::exchange(taken, std::nullopt));
    if (use_mapped(unit, exposure, out.front())) return issue(decision.issue);
  }
  if (taken) {
    take_prefetched(unit, *taken, gathered, exposure);
  } else {
    exposure.began = Clock::steady().now();
    exposure.cause = cause_of(before);
    exposure.needed_cap = predictor_.live_bytes();
  }
  const bool on_demand = gathered.slots.empty();
  if (on_demand) {
    ++context_.counters.on_demand;
    gathered.slots = idle_list();
    gather_now(unit, plane, gathered.slots);
  }
  refused_ = before.refused;
  note_exposure(exposure, index, plane);
  for (size_t i = 0; i < unit.buffers.size(); ++i) {
    const Parameter& p = *unit.buffers[i];
    const uint32_t slot = gathered.slots[i];
    out[i] = full_weight(p, slot, addresses_[slot]);
  }
  memory_->use(gathered.slots, unit.buffers, plane, !on_demand);
  keep_list(std::move(gathered.slots));
  issue(decision.issue);
}

bool Consumptions::planned(const Parameter& p) const {
  return units_[unit_of_weight_[p.weight.id]].used || (p.experts != 0 && units_[unit_of_experts_[p.experts - 1]].used);
}

Consumption Consumptions::first_use(const Parameter& p) const {
  const uint32_t unit = p.experts != 0 && units_[unit_of_experts_[p.experts - 1]].used ? unit_of_experts_[p.experts - 1]
                                                                                       : unit_of_weight_[p.weight.id];
  return {.weight = unit, .plane = p.weight.format.gathered(Plane::kRow), .phase = Phase::kForward, .micro_batch = 0};
}

std::optional<WeightId> Consumptions::weight_of(const std::optional<Consumption>& use) const {
  return use ? std::optional(units_[use->weight].weights.front()->weight.id) : std::nullopt;
}

std::optional<WeightId> Consumptions::before(const Parameter& p) const {
  return weight_of(predictor_.prev(first_use(p)));
}

std::optional<WeightId> Consumptions::after(const Parameter& p) const {
  return weight_of(predictor_.next(first_use(p)));
}

PrefetchPlan Consumptions::expected_plan() const {
  std::vector<Consumption> uses(predictor_.last_step().begin(), predictor_.last_step().end());
  std::erase_if(uses, [&](const Consumption& use) { return units_[use.weight].is_removed(); });
  const std::vector<GatherCost>& costs = predictor_.costs();
  if (uses.empty()) {
    // Experts are used as lists.
    std::vector<uint32_t> units;
    std::vector<std::string> names;
    std::vector<GatherCost> expected;
    for (uint32_t i = 0; i < units_.size(); ++i) {
      const Parameter& first = *units_[i].weights.front();
      if (first.weight.no_gather || units_[i].is_removed()) continue;
      if (units_[i].weights.size() == 1 && first.experts != 0) continue;
      units.push_back(i);
      names.push_back(first.name());
      expected.push_back(costs[i]);
    }
    uses = expected_step({.names = names, .costs = expected});
    for (Consumption& use : uses) use.weight = units[use.weight];
  }
  return plan_prefetch(uses, costs, predictor_.options());
}

std::string Consumptions::expected_order(std::span<const WeightId> folds) const {
  std::vector<std::string> units, folded;
  for (const Unit& unit : units_) {
    units.push_back(unit.weights.front()->name());
    if (unit.weights.size() > 1) units.back() += fmt::format(" +{}", unit.weights.size() - 1);
  }
  for (const WeightId weight : folds) folded.push_back(context_.parameters[weight]->name());
  return planned_order(expected_plan(), units, folded);
}

void Consumptions::stop() {
  drop(predictor_.update());
  await_gathers();
}

void Consumptions::stop_reading() {
  drop(predictor_.interrupt());
  await_gathers();
}

void Consumptions::await_gathers() {
  for (device::Stream* stream : context_.streams.gathers()) stream->synchronize(context_.group.deadline());
}

void Consumptions::begin_update() {
  stop();
  exposures_.end_step();
}

void Consumptions::end_update() {
  issue(predictor_.start());
}

}  // namespace tessera::etp
