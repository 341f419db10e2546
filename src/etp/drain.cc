// The end of an interval: nothing that any rank has produced is left.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>

#include "base/fail.h"
#include "base/mutation.h"
#include "base/rounding.h"
#include "codec/simd/reduce.h"
#include "collective/conditions.h"
#include "etp/gradients/gradients.h"
#include "layout/text_reader.h"

namespace tessera::etp {

using collective::Word;

// That one of the rounds that wait can be shown, or that this rank can say that it has no gradient for one of another.
class Gradients::ShowCondition final : public collective::WordsCondition {
 public:
  explicit ShowCondition(const Gradients& gradients)
      : WordsCondition(gradients.context_.group.shared_from_this()), gradients_(gradients) {}
  bool reached() const override {
    return std::ranges::any_of(gradients_.waiting_, [this](const Round* r) { return gradients_.can_show(*r); }) ||
           std::ranges::any_of(gradients_.context_.parameters,
                               [this](const auto& p) { return gradients_.can_pass(*p); });
  }
  std::string to_string() const override {
    const Round& first = *gradients_.waiting_.front();
    return fmt::format("the owners to fold earlier rounds of {}, of which this rank has produced {}",
                       first.parameter->name(), gradients_.weights_[first.parameter->weight.id].produced);
  }

 private:
  std::vector<int> awaited() const override {
    const Round& first = *gradients_.waiting_.front();
    return gradients_.owners_behind(first.parameter->weight, first.number - collective::kShownRounds + 1);
  }

  const Gradients& gradients_;
};

// That all ranks have closed the interval, or that there is something to fold before.
class Gradients::CloseCondition final : public collective::WordsCondition {
 public:
  CloseCondition(const Gradients& gradients, std::string meeting)
      : WordsCondition(gradients.context_.group.shared_from_this()),
        gradients_(gradients),
        meeting_(std::move(meeting)) {}
  bool reached() const override {
    return all_closed() || std::ranges::any_of(gradients_.context_.parameters,
                                               [this](const auto& p) { return gradients_.folds_missing(*p) > 0; });
  }
  std::string to_string() const override {
    const std::vector<int> late = awaited();
    return fmt::format("rank{} {} {}", late.size() == 1 ? "" : "s", fmt::join(late, ", "), meeting_);
  }
  void note(device::WaitNotes& notes) const override {
    notes.say(to_string());
    for (int rank = 0; rank < group().size(); ++rank)
      if (closed(rank))
        notes.edges.push_back(
            group().edge(rank, Word::kClosed, collective::kWholeRank, gradients_.context_.interval + 1));
  }

  bool all_closed() const { return awaited().empty(); }

 private:
  bool closed(int rank) const {
    const uint64_t interval = gradients_.context_.interval;
    const uint64_t closed = group().get(rank, Word::kClosed, collective::kWholeRank);
    if (closed > interval + 1)
      group().distrust(rank, Word::kClosed, collective::kWholeRank,
                       fmt::format("rank {} is in interval {}", group().rank(), interval));
    return closed > interval;
  }
  std::vector<int> awaited() const override {
    std::vector<int> open;
    for (int rank = 0; rank < group().size(); ++rank)
      if (!closed(rank)) open.push_back(rank);
    return open;
  }
  bool is_meeting() const override { return true; }
  std::string hint() const override {
    return meeting_ == kEndsBackward ? "has it made as many backward passes as this rank?"
                                     : "do all ranks make the same steps and writes?";
  }

  const Gradients& gradients_;
  const std::string meeting_;
};

void Gradients::flush(bool keep_sums) {
  std::vector<Round*> ready;
  for (auto& [key, uses] : uses_) {
    if (!keep_sums || !uses.sum || mutated(Mutation::kLastReductionDropped)) continue;
    ready.push_back(&start_round(*context_.parameters[key.first], std::move(uses.sum)));
  }
  for (Round* round : ready) {
    ++weights_[round->parameter->weight.id].waiting;
    waiting_.push_back(round);
  }
  for (auto& [key, uses] : uses_) {
    retire(uses.added);
    if (uses.sum) retired_sums_.push_back(std::move(uses.sum));
  }
  uses_.clear();
  // A rank that has no gradient closes its interval at once, and then folds what others show: nobody's wait needs more.
  if (follows_ && !order_.empty() &&
      order_.size() != (first_interval_ ? round_up(order_.size(), planned_.size()) : planned_.size()))
    leave_plan();
  show_waiting();
  const Deadline deadline = context_.group.deadline();
  while (!waiting_.empty()) {
    context_.compute->synchronize(deadline);
    context_.device.wait_host(ShowCondition(*this), deadline);
    show_waiting();
    for (const auto& p : context_.parameters)
      while (can_pass(*p)) pass(*p);
  }
  context_.compute->synchronize(deadline);
  retired_sums_.clear();
}

uint64_t Gradients::produced_anywhere(const Parameter& p) const {
  uint64_t rounds = 0;
  for (int q = 0; q < context_.ranks(); ++q) rounds = std::max(rounds, produced_rounds(q, p.weight));
  return rounds;
}

// The word is read before those of the owners, which only grow: the rank had seen no more of them when it stored it.
uint64_t Gradients::produced_rounds(int rank, const ShardedWeight& weight) const {
  const uint64_t word = context_.group.get(rank, Word::kProduced, weight.id);
  const uint64_t interval = collective::interval_of(word);
  const uint64_t rounds = collective::rounds_of(word);
  if (interval < context_.interval) return 0;
  if (interval > context_.interval)
    context_.group.distrust(rank, Word::kProduced, weight.id,
                            fmt::format("rank {} is in interval {}", context_.rank(), context_.interval));
  if (rounds <= collective::kShownRounds || rank == context_.rank()) return rounds;
  for (int q = 0; q < context_.ranks(); ++q) {
    if (!weight.owns(q)) continue;
    if (const uint64_t folded = folded_rounds(q, weight); rounds > folded + collective::kShownRounds)
      context_.group.distrust(rank, Word::kProduced, weight.id,
                              fmt::format("rank {} has reduced {} gradients of {} in interval {}", q, folded,
                                          tessera::quoted(weight.spec.name), context_.interval));
  }
  return rounds;
}

bool Gradients::can_pass(const Parameter& p) const {
  const WeightRounds& weight = weights_[p.weight.id];
  if (!p.started || weight.waiting > 0 || produced_anywhere(p) <= weight.produced) return false;
  return weight.produced < collective::kShownRounds ||
         owners_behind(p.weight, weight.produced - collective::kShownRounds + 1).empty();
}

void Gradients::pass(Parameter& p) {
  Round& round = rounds_.emplace_back();
  round.parameter = &p;
  round.number = weights_[p.weight.id].produced++;
  Round* const shown = &round;
  show({&shown, 1});
}

uint64_t Gradients::folds_missing(const Parameter& p) const {
  if (!p.started) return 0;
  const WeightRounds& weight = weights_[p.weight.id];
  if (mutated(Mutation::kDrainForgetsHead) && weight.produced == 0) return 0;
  const uint64_t produced = produced_anywhere(p);
  return produced > weight.folds ? produced - weight.folds : 0;
}

void Gradients::fold_missing() {
  std::vector<Round*> rest;
  for (const auto& p : context_.parameters) {
    const uint64_t missing = folds_missing(*p);
    const uint64_t first = weights_[p->weight.id].folds;
    for (uint64_t number = first; number < first + missing; ++number) {
      Round& round = rounds_.emplace_back();
      round.parameter = p.get();
      round.number = number;
      round.shown = true;
      rest.push_back(&round);
    }
  }
  fold(rest);
}

void Gradients::close_interval(const std::string& meeting, const Deadline& deadline) {
  collective::Group& group = context_.group;
  const uint64_t interval = context_.interval;
  closed_ = true;
  group.set(Word::kClosed, collective::kWholeRank, interval + 1);
  const CloseCondition closed(*this, meeting);
  // Others may need folds of rounds that this rank has none for, to show what they have left.
  for (bool all = false; !all;) {
    context_.device.wait_host(closed, deadline);
    all = closed.all_closed();
    fold_missing();
  }
  for (device::Stream* stream : context_.streams.reductions()) {
    const device::Event event = stream->record();
    context_.device.wait_host(event, group.deadline());
  }
}

IntervalEnd Gradients::interval_end(bool abandoned) const {
  return {.order = order_.empty() ? 0 : XXH3_64bits(order_.data(), order_.size() * sizeof(WeightId)) | 1,
          .left_plan = left_plan_,
          .abandoned = abandoned};
}

void Gradients::end_interval(std::span<const IntervalEnd> ranks) {
  earlier_ = added();
  for (Round& round : rounds_) round.gradient = {};
  rounds_.clear();
  waiting_.clear();
  first_unreturned_ = first_unreported_ = 0;
  for (WeightRounds& weight : weights_) weight = {};
  // One without any gradient, as between a backward and its update, tells of no order.
  if (std::ranges::any_of(ranks, [](const IntervalEnd& end) { return end.order != 0; })) {
    follows_ = std::ranges::all_of(ranks, [&](const IntervalEnd& end) { return end.order == ranks.front().order; });
    if (!order_.empty()) planned_ = std::exchange(order_, {});
    first_interval_ = false;
  }
  for (size_t q = 0; q < ranks.size(); ++q) left_before_[q] = ranks[q].left_plan;
  closed_ = false;
  ++context_.interval;
}

void add_gradient(DType dtype, const void* from, void* into, size_t elements) {
  constexpr size_t kBlock = 1024;
  std::array<float, kBlock> sum;
  const AccumulateRow first = accumulate_row(ReduceOp::kSum, dtype, true);
  const AccumulateRow next = accumulate_row(ReduceOp::kSum, dtype, false);
  const FinishRow finish = finish_row(ReduceOp::kSum, dtype);
  const auto element = static_cast<size_t>(bytes_of(dtype, 1));
  for (size_t done = 0; done < elements; done += kBlock) {
    const size_t n = std::min(kBlock, elements - done);
    std::byte* const to = static_cast<std::byte*>(into) + done * element;
    first(to, sum.data(), n);
    next(static_cast<const std::byte*>(from) + done * element, sum.data(), n);
    finish(sum.data(), to, n, 2);
  }
}

}  // namespace tessera::etp
