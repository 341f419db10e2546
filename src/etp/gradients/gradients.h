// Rounds of gradients on this rank: buffers, local sums of several uses, what is shown to the owners, and folds into
// this rank's rows.
//
// A round is shown once its ring on the page has room: the fourth round before it is folded by all owners. Until then
// it waits here, and nobody waits for it; the drain shows what is left. So a producer never waits for a peer, except
// for room in the pool while all ranks follow the order of the last interval, or, in the first one, that in which
// weights were added, from the last to the first, once a micro-batch: each then folds in the order in which all
// produce, and the rank that is farthest behind never waits.
//
// In a drain, too, no cycle of waits exists. A fold of round j is given to a stream only once that round is shown, so
// all owners have folded round j - 4, and every rank has room to show rounds up to j: those that it has, or that it has
// none. A rank that waits for room does that; one that does not wait has closed the interval.
//
// Words of other ranks are believed only as far as this order of things allows: nobody is in another interval than this
// rank between two drains, an owner folds no round that this rank may still show, and a rank shows at most kShownRounds
// rounds more than every owner has folded. Anything else fails the group at once, since a rank that believed it would
// fold millions of rounds, or write a gradient that owners still read.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "etp/capture/captured_part.h"
#include "etp/context.h"
#include "etp/gradients/gradient_pool.h"
#include "etp/schedule/forecast.h"
#include "etp/schedule/states.h"

namespace tessera::etp {

// What the others are waited for in a drain, unless it is a part of something else.
inline constexpr std::string_view kEndsBackward = "to end a backward";

// What a rank tells all others at the end of an interval.
struct IntervalEnd {
  uint64_t order = 0;      // digest of the weights it produced for, in order; 0: none
  uint64_t left_plan = 0;  // its kLeftPlan
  bool abandoned = false;
  bool lost = false;  // gradients that no drain will add
  // Of a rank that has abandoned: what calls that ended early may have left different.
  uint64_t updates = 0;
  std::vector<uint64_t> versions{};  // of each weight
  std::vector<uint64_t> removed{};   // by this rank, whose memory is there

  static void fields(auto& f, auto& self) {
    f("order", self.order);
    f("left_plan", self.left_plan);
    f("abandoned", self.abandoned);
    f("lost", self.lost);
    f("updates", self.updates);
    f.array("versions", self.versions, uint32_t{1} << 24);
    f.array("removed", self.removed, uint32_t{1} << 24);
  }
};

// into = round(f32(into) + f32(from)), element by element, as autograd adds gradients of one dtype.
void add_gradient(DType dtype, const void* from, void* into, size_t elements);

// Under the runtime's lock.
class Gradients {
 public:
  // `captured`: of gradients that captured operations write; who gets a buffer of it writes on the same stream.
  Gradients(RuntimeContext& context, std::shared_ptr<GradientPool> pool, std::shared_ptr<GradientPool> captured);

  void add(Parameter& parameter);
  // All ranks have added the same weights, and make this call between the same others.
  void start();
  // A forward use that a backward use will follow.
  void announce(const Parameter& parameter, int micro_batch);
  GradientBuffer buffer(Parameter& parameter, int micro_batch);
  // `own_round`: those that were not announced are rounds; else the drain makes one of them.
  void produce(std::span<GradientBuffer> gradients, bool own_round);
  // The same two while a capture is recorded: an address that is the same in each replay, and what a replay produces
  // from there. It is copied: the owners may read a round for longer than until the next replay.
  GradientBuffer captured_buffer(Parameter& parameter, int micro_batch);
  std::vector<CapturedGradient> capture(std::span<GradientBuffer> gradients) const;
  void replay(std::span<const CapturedGradient> gradients, int micro_batch);
  // Rounds whose fold has ended; never waits.
  std::vector<Added> added();
  // To be told by the next added().
  void keep(std::vector<Added> added);
  // The weights whose rounds the next interval is expected to have, in order.
  std::span<const WeightId> expected_order() const { return planned_; }
  // Whether a gradient of the weight is summed, shown or folded in this interval.
  bool in_flight(WeightId weight) const;
  // Of its oldest round that added() has not told of: kAsyncWait until it is folded here.
  WeightState state_of(WeightId weight) const;

  // The steps of a drain (drain.cc), in this order.
  void flush(bool keep_sums);  // sums become rounds, or are dropped; then all rounds are shown
  // And every gradient of every rank is folded into this rank's rows. `meeting`: what the others are waited for, as a
  // predicate.
  void close_interval(const std::string& meeting, const Deadline& deadline);
  IntervalEnd interval_end(bool abandoned) const;
  void end_interval(std::span<const IntervalEnd> ranks);  // all ranks have folded everything: buffers are free

 private:
  struct Round {
    Parameter* parameter = nullptr;
    uint64_t number = 0;
    GradientBuffer gradient{};  // empty once it is returned, or if this rank has none
    device::Event folded{};     // of this rank's rows
    int contributors = 0;       // written by the fold
    bool shown = false;
    bool returned = false;
  };
  struct WeightRounds {
    uint64_t produced = 0;  // by this rank, in this interval
    uint64_t shown = 0;
    uint64_t folds = 0;  // given to the stream
    int waiting = 0;
  };
  // Uses of a weight in one micro-batch.
  struct Uses {
    int announced = 0;
    int come = 0;
    GradientBuffer sum{};
    std::vector<GradientBuffer> added{};  // to the sum, by operations that may not have run
  };
  class RoomCondition;
  class ShowCondition;
  class CloseCondition;

  void check_trained(const Parameter& parameter) const;
  static GradientBuffer buffer_of(const Parameter& parameter, int micro_batch, const GradientPool::Taken& taken,
                                  std::shared_ptr<GradientPool> pool);
  void check(const GradientBuffer& gradient) const;
  // The sum so far with this one; whether it is complete.
  bool sum_up(GradientBuffer& gradient, bool own_round);
  // Keeps buffers that operations may still read until the next drain.
  void retire(std::vector<GradientBuffer>& added);
  Round& start_round(Parameter& parameter, GradientBuffer gradient);
  // Shows those that have room, in order, and has them folded here.
  void show(std::span<Round* const> rounds);
  void show_waiting();
  void fold(std::span<Round* const> rounds);
  bool can_show(const Round& round) const;
  // Owners that have folded fewer rounds of it in this interval.
  std::vector<int> owners_behind(const ShardedWeight& weight, uint64_t rounds) const;
  // Returns the rounds of this interval that an owner has folded. Fails the group if it cannot have.
  uint64_t folded_rounds(int owner, const ShardedWeight& weight) const;
  bool folded_by_all(const Round& round) const;
  // Returns the rounds of the weight that a rank has produced in this interval. Fails the group if it cannot have.
  uint64_t produced_rounds(int rank, const ShardedWeight& weight) const;
  // Rounds of the weight that any rank shows in this interval.
  uint64_t produced_anywhere(const Parameter& parameter) const;
  // Whether another rank has a round that this one will not have, and there is room to say so.
  bool can_pass(const Parameter& parameter) const;
  void pass(Parameter& parameter);
  // Rounds of any rank that are not given to this rank's stream yet.
  uint64_t folds_missing(const Parameter& parameter) const;
  void fold_missing();
  // Returns buffers of rounds that all owners have folded.
  void reclaim();
  void note_order(WeightId weight);
  void leave_plan();
  bool somebody_left_plan() const;
  bool wait_for_room(size_t bytes);

  RuntimeContext& context_;
  std::shared_ptr<GradientPool> pool_;
  std::shared_ptr<GradientPool> captured_pool_;
  std::vector<WeightRounds> weights_;
  std::map<std::pair<WeightId, int>, Uses> uses_;
  std::deque<Round> rounds_;  // of this interval
  size_t first_unreturned_ = 0;
  size_t first_unreported_ = 0;
  std::vector<Round*> waiting_;               // to be shown
  std::vector<GradientBuffer> retired_sums_;  // likewise, of complete rounds
  std::vector<Added> earlier_;                // of rounds of intervals that ended
  std::vector<WeightId> order_;               // of this interval's rounds
  std::vector<WeightId> planned_;             // of the last interval that had rounds; first: as they were added
  bool first_interval_ = true;
  bool closed_ = false;   // the interval, by this rank: it shows no further round in it
  bool follows_ = false;  // the plan: all ranks have the same
  uint64_t left_plan_ = 0;
  std::vector<uint64_t> left_before_;  // kLeftPlan of each rank when the interval began
};

}  // namespace tessera::etp
