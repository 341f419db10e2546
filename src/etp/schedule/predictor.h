// Predicts which weights are used next, from what followed last time, and decides what to prefetch: plan_prefetch(),
// but one use at a time, for an order that may change.
//
// What followed a use (its weight, plane, phase and micro-batch position) last time is predicted to follow again. A
// weight that is used several times in a pass has a place in the order for each; passes are told apart by update() and
// new_pass(). After a use that has no last time, what followed it in the micro-batch before is predicted: a step that
// is the first with several micro-batches is prefetched from the second one on. A use that was not predicted is
// gathered on demand; prefetches that no longer lie ahead are dropped, and from then on the new order is predicted. A
// prefetch serves any use of the same weight and plane.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "etp/schedule/consumption.h"

namespace tessera::etp {

struct Prefetch {
  uint64_t id = 0;  // ascending, never reused
  Consumption use;

  friend bool operator==(const Prefetch&, const Prefetch&) = default;
};

// What to do at a use. The spans are valid until the next call.
struct UseDecision {
  std::optional<uint64_t> taken;      // the prefetch that serves it; none: gather on demand
  std::span<const uint64_t> dropped;  // prefetches that nobody will take: release their buffers once they have arrived
  std::span<const Prefetch> issue;    // gather these now, in this order
};

struct PredictorCounters {
  int64_t uses = 0;
  int64_t on_demand = 0;     // uses that no prefetch served
  int64_t mispredicted = 0;  // uses of another weight or plane than predicted
  int64_t issued = 0;        // prefetches
  int64_t wasted = 0;        // prefetches that were dropped
  int64_t refused = 0;       // times that a prefetch did not fit below the cap

  friend bool operator==(const PredictorCounters&, const PredictorCounters&) = default;
};

// Not thread-safe. In a steady state no call allocates, and observe() takes well below a microsecond.
class Predictor {
 public:
  // Learns at most so many places; uses beyond are gathered on demand.
  static constexpr size_t kMaxPlaces = 1 << 20;
  static constexpr size_t kMaxRecorded = 1 << 16;  // uses of last_step()

  // `costs`: of weight 0, 1, ... Throws as check_options() does.
  explicit Predictor(PrefetchOptions options, std::vector<GatherCost> costs = {});

  uint32_t add(GatherCost cost);  // one more weight; returns its index
  void set_options(const PrefetchOptions& options);

  // Call it at each use, before its gather. Throws Error(kInvalidArgument) for an unknown weight.
  UseDecision observe(const Consumption& use);
  // The weights are about to change: the step ends here, and everything that is prefetched is dropped. Returns its ids.
  std::span<const uint64_t> update();
  // They change amid a step, which goes on: what is prefetched is dropped. Returns its ids.
  std::span<const uint64_t> interrupt();
  // The new versions are published: what the first uses of a step are expected to need.
  std::span<const Prefetch> start();
  // Uses of the chain are replayed, which are not observed. Where they begin a step, nothing else is expected to.
  void replayed(Chain chain);
  // A pass without gradients begins. Optional: without it, one is taken to begin once a weight comes a second time.
  void new_pass();

  // What is predicted to come after, or before, the first use of this kind in a step.
  std::optional<Consumption> next(const Consumption& use) const;
  std::optional<Consumption> prev(const Consumption& use) const;
  // The uses between the last two updates, in order, for plan_prefetch() and link_table().
  std::span<const Consumption> last_step() const { return last_step_; }

  const std::vector<GatherCost>& costs() const { return costs_; }
  const PrefetchOptions& options() const { return options_; }
  const PredictorCounters& counters() const { return counters_; }
  int64_t live_bytes() const { return live_bytes_; }  // of the present use and of prefetches
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  using PlaceIndex = uint32_t;
  static constexpr PlaceIndex kUnknown = UINT32_MAX;
  static constexpr PlaceIndex kEnd = UINT32_MAX - 1;  // of a step

  // A place in the order.
  struct Place {
    Consumption use{};
    PlaceIndex next = kUnknown;
    PlaceIndex prev = kUnknown;
    PlaceIndex sibling = kUnknown;  // the next place of an equal use
    PlaceIndex before = kUnknown;   // that of the same use one micro-batch earlier
    PlaceIndex after = kUnknown;    // and one later
    uint64_t pass = 0;              // it was reached last in this pass
  };
  struct Issued {
    uint64_t id = 0;
    PlaceIndex place = kUnknown;
  };
  struct ChainState {
    PlaceIndex cursor = kUnknown;  // the place of the last use; at first that before a step's first use
    std::vector<Issued> issued{};  // prefetches that wait for their use
  };
  struct UseHash {
    size_t operator()(const Consumption& use) const;
  };

  bool is_place(PlaceIndex index) const { return index < places_.size(); }
  static PlaceIndex start_of(size_t chain) { return static_cast<PlaceIndex>(chain); }
  int64_t bytes_of_use(const Consumption& use) const;
  // Of equal uses, in the order in which they were made: the first that this pass has not reached; if none, the last.
  struct Siblings {
    PlaceIndex unreached = kUnknown;
    PlaceIndex last = kUnknown;
  };
  Siblings siblings_of(const Consumption& use) const;
  PlaceIndex last_of(const Consumption& use) const;
  PlaceIndex place_of(const Consumption& use, PlaceIndex predicted);
  PlaceIndex before_of(const Consumption& use, PlaceIndex last) const;
  PlaceIndex make_place(const Consumption& use, PlaceIndex last, PlaceIndex before);
  void expect_as_before(PlaceIndex place);
  void move_to(ChainState& chain, PlaceIndex place);
  void look_ahead(const ChainState& chain);
  std::optional<uint64_t> take(ChainState& chain, PlaceIndex place, const Consumption& use);
  void drop_what_is_not_ahead(ChainState& chain);
  void make_room(int64_t bytes);
  void drop(ChainState& chain, size_t position);
  void issue(ChainState& chain);
  void record(const Consumption& use);

  PrefetchOptions options_;
  std::vector<GatherCost> costs_;
  std::vector<std::array<int64_t, 2>> bytes_{};  // of each weight's planes
  std::vector<Place> places_{};                  // first, for each chain, the one before a step's first use
  std::unordered_map<Consumption, PlaceIndex, UseHash> first_places_{};
  std::array<ChainState, kChains> chains_{};
  uint64_t pass_ = 1;
  bool passes_are_told_ = false;
  uint64_t next_id_ = 1;
  int64_t live_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t current_bytes_ = 0;
  PredictorCounters counters_{};
  std::vector<PlaceIndex> ahead_{};  // of look_ahead(), the nearest first
  std::vector<uint64_t> dropped_{};
  std::vector<Prefetch> to_issue_{};
  std::vector<Consumption> this_step_{};
  std::vector<Consumption> last_step_{};
};

}  // namespace tessera::etp
