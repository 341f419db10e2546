// Uses of weights: what was prefetched is taken, what was not is gathered now, and what the plan predicts is gathered
// on the side.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collective/movement/gather.h"
#include "etp/capture/captured_part.h"
#include "etp/context.h"
#include "etp/exposure.h"
#include "etp/gather_memory.h"
#include "etp/schedule/gather_cost.h"
#include "etp/schedule/plan.h"
#include "etp/schedule/predictor.h"
#include "etp/weight_view.h"

namespace tessera::etp {

// REQUIRES: `options` are resolved().
PrefetchOptions prefetch_options(const RuntimeOptions& options);

// Under the runtime's lock.
class Consumptions {
 public:
  Consumptions(RuntimeContext& context, std::shared_ptr<GatherMemory> memory,
               std::shared_ptr<WeightView::Shared> views);

  // Something that is used as one: a weight, or a list of experts. `whole`: what has a buffer for all of them; null:
  // each has its own.
  void add(Parameter& parameter);
  void add_experts(std::span<Parameter* const> experts, Parameter* whole);
  // Chains have changed: what was learnt is forgotten.
  void rebuild();
  // This rank uses them no more: they are not gathered ahead, and who still has one keeps what it shows. Throws as
  // detach().
  void remove(std::span<Parameter* const> weights);

  // Fills `out`, one for each of `weights`: one weight, or all of a list of experts; of a stack the first of `out`
  // only.
  void acquire(std::span<Parameter* const> weights, Phase phase, const Use& use, std::span<FullWeight> out);

  // Mapped weights (mapped_uses.cc) ----

  // Peers know these weights now. Those that turn out not to be mappable are gathered from now on.
  void map(std::span<Parameter* const> weights);
  // This rank reads them no longer: who still has one keeps what it shows. Throws Error(kResourceExhausted).
  void detach(std::span<Parameter* const> weights);
  // The same of all; there are no further uses.
  void close();
  int64_t mapped_bytes() const { return views_->mapped.load(std::memory_order_relaxed); }
  int64_t detached_bytes() const { return views_->detached.load(std::memory_order_relaxed); }

  // Captures (captured_uses.cc) ----

  // Likewise while `part` is recorded: reserves addresses, and gathers nothing. Throws Error(kInvalidArgument) for
  // weights of the ungraphed chain.
  void capture(std::span<Parameter* const> weights, Phase phase, const Use& use, std::span<FullWeight> out,
               CapturedPart& part);
  // Throws Error(kInvalidArgument) that names the weight if the program has one of its FullWeights.
  void end_capture(CapturedPart& part);
  void forget(CapturedPart& part);
  // A replay: its beginning, then each use and each release in turn; recover() if it ends early. The first one throws
  // Error(kInvalidArgument), with nothing done, if a weight is not published.
  void begin_replay(CapturedPart& part);
  void replay_use(CapturedPart& part, size_t use);
  void replay_release(CapturedPart& part, uint32_t slot);
  void recover(CapturedPart& part);
  std::span<Parameter* const> weights_of(const CapturedUse& use) const { return units_[use.unit].weights; }

  // Prefetches are dropped, and gathers that are under way have ended when it returns.
  void stop();
  // The same; the step goes on behind it.
  void stop_reading();
  // The weights change: prefetches are dropped, and gathers that are under way have ended when it returns.
  void begin_update();
  // New versions are there: the first uses of a step are prefetched.
  void end_update();

  // What a step is expected to take before the first has run; of the last one since.
  PrefetchPlan expected_plan() const;
  // What a step's gathers are expected to be, and behind them these folds: see planned_order.h.
  std::string expected_order(std::span<const WeightId> folds) const;
  // Whether a plan knows it: it has been used.
  bool planned(const Parameter& parameter) const;
  // What is predicted around its first forward use in a step; of a list of experts, the first one.
  std::optional<WeightId> before(const Parameter& parameter) const;
  std::optional<WeightId> after(const Parameter& parameter) const;
  const PredictorCounters& counters() const { return predictor_.counters(); }
  const ExposureLog& exposures() const { return exposures_; }
  ExposureLog& exposures() { return exposures_; }
  const Predictor& predictor() const { return predictor_; }

 private:
  // A gather of one weight into one buffer, which is enqueued again and again.
  using Operations = std::vector<std::shared_ptr<const device::Operation>>;
  struct ReadyGather {
    std::byte* to = nullptr;
    Plane plane = Plane::kRow;
    uint64_t version = 0;  // that its record tells of
    Operations operations;
  };
  static constexpr size_t kReadyGathers = 8;  // of a weight: of its buffers and planes

  struct Unit {
    std::vector<Parameter*> weights;
    std::vector<Parameter*> buffers;  // what is gathered into one each: the weights, or what stands for their stack
    Chain chain = Chain::kUngraphed;
    bool used = false;
    std::vector<ReadyGather> ready{};

    bool is_removed() const {
      return std::ranges::any_of(weights, [](const Parameter* p) { return p->removed; });
    }
    bool is_mapped() const { return weights.size() == 1 && weights.front()->weight.mapped; }
  };
  struct InFlight {
    uint64_t id = 0;
    Consumption use;
    std::vector<uint32_t> slots;  // empty: it is not gathered ahead
    device::Event arrives;
    TimePoint issued;
    int64_t needed_cap = 0;  // above 0: it did not fit
  };

  GatherCost cost_of(const Unit& unit);
  Consumption first_use(const Parameter& parameter) const;
  std::optional<WeightId> weight_of(const std::optional<Consumption>& use) const;
  uint32_t unit_of(std::span<Parameter* const> weights) const;
  // Before a gather writes there.
  void prepare(const Parameter& p, Plane plane, const GatherMemory::Taken& taken, device::Stream& stream);
  collective::GatherPart part_of(const Parameter& p, Plane plane, std::byte* to) const;
  const Operations& ready_gather(Unit& unit, Plane plane, std::byte* to);
  // Not worth a stream, nor an operation for each owner.
  bool is_small(const Unit& unit, Plane plane) const;
  // Takes buffers and enqueues the unit's gather. `slots`: empty, or the reserved ones.
  void gather(Unit& unit, Plane plane, device::Stream& stream, StateStep step, std::vector<uint32_t>& slots);
  // Both likewise. If the first one throws, slots that were not reserved are free again.
  void gather_now(Unit& unit, Plane plane, std::vector<uint32_t>& slots);
  device::Event start_gather(Unit& unit, Plane plane, std::vector<uint32_t>& slots);
  void issue(std::span<const Prefetch> prefetches);
  // 0 if its prefetch fits beside all that is in use, also where uses last longer than was predicted.
  int64_t cap_needed(const Consumption& use);
  void drop(std::span<const uint64_t> prefetches);
  void take_prefetched(const Unit& unit, uint64_t id, InFlight& gathered, Exposure& exposure);
  void await_gather(const Unit& unit, const device::Event& arrives, TimePoint issued, Exposure& exposure);
  void note_exposure(Exposure& exposure, uint32_t unit, Plane plane);
  std::vector<uint32_t> idle_list();
  void keep_list(std::vector<uint32_t> list);
  InFlight take(uint64_t id);
  void arrive(const device::Event& gathered);
  void await_gathers();
  // The first owner that has not published the unit's versions; -1: all have.
  int unpublished_owner(const Unit& unit) const;
  void await_published(const Unit& unit);
  void use_in_place(Parameter& p, FullWeight& out);
  bool make_view(Parameter& p);
  // False if it cannot be mapped (any more). Waits for its owners to publish it.
  bool use_mapped(Unit& unit, Exposure exposure, FullWeight& out);
  void note_use_in_place(const Parameter& p) const;
  FullWeight full_weight(const Parameter& p, uint32_t slot, const std::byte* data) const;
  ExposureCause cause_of(const PredictorCounters& before) const;
  int reach(const Unit& unit) const { return predictor_.options().reach(unit.weights.size() > 1); }
  // The slots of a captured use.
  void reserve(std::span<FullWeight> out, CapturedUse& use, CapturedPart& part);
  void give_up_prefetches(Chain chain);
  void put_back_released(CapturedPart& part, size_t before);
  // Gathers what comes next in a replay, as far as distance and free buffers go.
  void gather_ahead(CapturedPart& part);

  RuntimeContext& context_;
  std::shared_ptr<GatherMemory> memory_;
  std::shared_ptr<WeightView::Shared> views_;
  std::vector<Unit> units_;
  std::vector<uint32_t> unit_of_weight_;
  std::vector<uint32_t> unit_of_experts_;
  BufferKeys keys_;
  Predictor predictor_;
  std::vector<InFlight> in_flight_;
  std::vector<std::vector<uint32_t>> idle_lists_;  // of slots; kept so that a steady state allocates nothing
  std::vector<std::byte*> addresses_;              // of slots
  std::vector<GatherMemory::Taken> taken_;         // by gather(); likewise
  int64_t refused_ = 0;
  ExposureLog exposures_;
};

}  // namespace tessera::etp
