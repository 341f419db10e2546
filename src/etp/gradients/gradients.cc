#include "etp/gradients/gradients.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/fail.h"
#include "base/mutation.h"
#include "collective/conditions.h"
#include "collective/movement/fold.h"
#include "layout/text_reader.h"

namespace tessera::etp {

using collective::Word;

// That the oldest round of a size is folded by all owners, or that it makes no sense to wait for it.
class Gradients::RoomCondition final : public collective::WordsCondition {
 public:
  RoomCondition(const Gradients& gradients, const Round& oldest)
      : WordsCondition(gradients.context_.group.shared_from_this()), gradients_(gradients), oldest_(oldest) {}
  bool reached() const override { return gradients_.folded_by_all(oldest_) || gradients_.somebody_left_plan(); }
  std::string to_string() const override {
    return fmt::format("the owners to fold round {} of {}", oldest_.number, oldest_.parameter->name());
  }

 private:
  std::vector<int> awaited() const override {
    return gradients_.owners_behind(oldest_.parameter->weight, oldest_.number + 1);
  }

  const Gradients& gradients_;
  const Round& oldest_;
};

Gradients::Gradients(RuntimeContext& context, std::shared_ptr<GradientPool> pool,
                     std::shared_ptr<GradientPool> captured)
    : context_(context),
      pool_(std::move(pool)),
      captured_pool_(std::move(captured)),
      left_before_(static_cast<size_t>(context.ranks()), 0) {
  const auto ranks = static_cast<size_t>(context.ranks());
  for (size_t q = 0; q < ranks; ++q)
    left_before_[q] = context.group.get(static_cast<int>(q), Word::kLeftPlan, collective::kWholeRank);
  left_plan_ = left_before_[static_cast<size_t>(context.rank())];
}

void Gradients::add(Parameter& p) {
  TESSERA_CHECK_EQ(weights_.size(), static_cast<size_t>(p.weight.id));
  weights_.emplace_back();
}

void Gradients::start() {
  if (!first_interval_) return;
  if (!order_.empty()) return leave_plan();
  planned_.clear();
  for (const auto& p : context_.parameters)
    if (p->trained() && !p->removed) planned_.push_back(p->weight.id);
  // A list of experts is produced in its order.
  std::ranges::reverse(planned_);
  for (const auto& list : context_.experts) {
    const auto in_list = [&](WeightId id) { return context_.parameters[id]->experts == list.front()->experts; };
    const auto first = std::ranges::find_if(planned_, in_list);
    const auto rest = std::stable_partition(first, planned_.end(), in_list);
    std::ranges::sort(first, rest, {}, [&](WeightId id) { return context_.parameters[id]->expert_index; });
  }
  follows_ = !planned_.empty();
}

void Gradients::announce(const Parameter& p, int micro_batch) {
  ++uses_[{p.weight.id, micro_batch}].announced;
}

bool Gradients::in_flight(WeightId weight) const {
  if (weights_[weight].produced > 0) return true;
  for (auto use = uses_.lower_bound({weight, 0}); use != uses_.end() && use->first.first == weight; ++use)
    if (use->second.come > 0) return true;
  return false;
}

WeightState Gradients::state_of(WeightId weight) const {
  for (size_t i = first_unreported_; i < rounds_.size(); ++i) {
    const Round& round = rounds_[i];
    if (round.parameter->weight.id != weight) continue;
    return round.shown && round.folded.done() ? WeightState::kDataReady : WeightState::kAsyncWait;
  }
  for (auto use = uses_.lower_bound({weight, 0}); use != uses_.end() && use->first.first == weight; ++use)
    if (use->second.come > 0) return WeightState::kAsyncWait;
  return WeightState::kNone;
}

void Gradients::check_trained(const Parameter& p) const {
  if (!p.trained())
    fail(ErrorCode::kInvalidArgument, "{} is frozen, so it has no gradient: set_frozen() first"_message,
         tessera::quoted(p.name()));
}

GradientBuffer Gradients::buffer(Parameter& p, int micro_batch) {
  check_trained(p);
  const auto bytes = static_cast<size_t>(p.weight.gradient_bytes());
  GradientPool::Taken taken;
  if (!pool_->take_free(bytes, taken)) {
    show_waiting();
    reclaim();
    if (!pool_->take_free(bytes, taken) && !(wait_for_room(bytes) && pool_->take_free(bytes, taken))) {
      if (pool_->taken(bytes) >= kRoundsInFlight) ++context_.counters.pool_grown;
      taken = pool_->allocate(bytes, p.name());
    }
  }
  return buffer_of(p, micro_batch, taken, pool_);
}

GradientBuffer Gradients::buffer_of(const Parameter& p, int micro_batch, const GradientPool::Taken& taken,
                                    std::shared_ptr<GradientPool> pool) {
  GradientBuffer gradient;
  gradient.pool_ = std::move(pool);
  gradient.data_ = taken.data;
  gradient.entry_ = taken.entry;
  gradient.weight_ = p.weight.id;
  gradient.micro_batch_ = micro_batch;
  gradient.dtype_ = p.weight.gradient;
  gradient.rows_ = p.weight.spec.rows;
  gradient.columns_ = p.weight.columns();
  return gradient;
}

bool Gradients::wait_for_room(size_t bytes) {
  if (!follows_ || !waiting_.empty() || pool_->taken(bytes) < kRoundsInFlight || somebody_left_plan()) return false;
  const auto oldest = std::find_if(
      rounds_.begin() + static_cast<std::ptrdiff_t>(first_unreturned_), rounds_.end(), [&](const Round& round) {
        return round.shown && !round.returned && static_cast<size_t>(round.parameter->weight.gradient_bytes()) == bytes;
      });
  if (oldest == rounds_.end()) return false;
  ++context_.counters.room_waits;
  if (!context_.compute->runs_inline()) context_.compute->synchronize(context_.group.deadline());
  context_.device.wait_host(RoomCondition(*this, *oldest), context_.group.deadline());
  reclaim();
  return true;
}

void Gradients::check(const GradientBuffer& gradient) const {
  if (!gradient || gradient.pool_ != pool_)
    fail(ErrorCode::kInvalidArgument,
         "produce() got a buffer that gradient_buffer() of this runtime has not given: copy into one of those"_message);
}

GradientBuffer Gradients::captured_buffer(Parameter& p, int micro_batch) {
  check_trained(p);
  const auto bytes = static_cast<size_t>(p.weight.gradient_bytes());
  GradientPool::Taken taken;
  if (!captured_pool_->take_free(bytes, taken)) taken = captured_pool_->allocate(bytes, p.name());
  return buffer_of(p, micro_batch, taken, captured_pool_);
}

std::vector<CapturedGradient> Gradients::capture(std::span<GradientBuffer> gradients) const {
  std::vector<CapturedGradient> captured;
  for (const GradientBuffer& gradient : gradients) {
    if (!gradient || gradient.pool_ != captured_pool_)
      fail(ErrorCode::kInvalidArgument,
           "a capture produces a buffer that gradient_buffer() has not given inside of it"_message);
    captured.push_back({.weight = gradient.weight(), .micro_batch = gradient.micro_batch(), .data = gradient.data()});
  }
  for (GradientBuffer& gradient : gradients) gradient = {};
  return captured;
}

void Gradients::replay(std::span<const CapturedGradient> gradients, int micro_batch) {
  std::vector<GradientBuffer> copies;
  for (const CapturedGradient& gradient : gradients) {
    Parameter& p = *context_.parameters[gradient.weight];
    copies.push_back(buffer(p, gradient.micro_batch + micro_batch));
    context_.compute->enqueue(device::copy_operation("copy", p.name(), copies.back().data(), gradient.data,
                                                     static_cast<size_t>(p.weight.gradient_bytes())));
  }
  produce(copies, true);
}

bool Gradients::sum_up(GradientBuffer& gradient, bool own_round) {
  const auto key = std::pair(gradient.weight(), gradient.micro_batch());
  auto found = uses_.find(key);
  if (found == uses_.end()) {
    if (own_round) return true;
    found = uses_.emplace(key, Uses{.announced = std::numeric_limits<int>::max()}).first;
  }
  Uses& uses = found->second;
  ++uses.come;
  if (uses.sum) {
    const auto elements = static_cast<size_t>(gradient.rows() * gradient.columns());
    context_.compute->enqueue({.name = "sum",
                               .subject = context_.parameters[gradient.weight()]->name(),
                               .accesses = {device::read_of(gradient.data(), pool_->size_of(gradient.entry_)),
                                            device::write_of(uses.sum.data(), pool_->size_of(uses.sum.entry_))},
                               .body = [into = uses.sum.data(), from = gradient.data(), elements,
                                        dtype = gradient.dtype()] { add_gradient(dtype, from, into, elements); }});
    if (context_.compute->runs_inline())
      gradient = {};
    else
      uses.added.push_back(std::move(gradient));
    gradient = std::move(uses.sum);
  }
  if (uses.come < uses.announced) {
    uses.sum = std::move(gradient);
    return false;
  }
  retire(uses.added);
  uses_.erase(found);
  return true;
}

void Gradients::retire(std::vector<GradientBuffer>& added) {
  retired_sums_.insert(retired_sums_.end(), std::make_move_iterator(added.begin()),
                       std::make_move_iterator(added.end()));
}

Gradients::Round& Gradients::start_round(Parameter& p, GradientBuffer gradient) {
  WeightRounds& weight = weights_[p.weight.id];
  note_order(p.weight.id);
  ++context_.counters.rounds;
  Round& round = rounds_.emplace_back();
  round.parameter = &p;
  round.number = weight.produced++;
  round.gradient = std::move(gradient);
  return round;
}

void Gradients::produce(std::span<GradientBuffer> gradients, bool own_round) {
  std::vector<Round*> ready;
  for (const GradientBuffer& gradient : gradients) check(gradient);
  for (GradientBuffer& given : gradients) {
    GradientBuffer gradient = std::move(given);
    Parameter& p = *context_.parameters[gradient.weight()];
    if (context_.compute->runs_inline())
      context_.note_host_write("wgrad", p, gradient.data(), pool_->size_of(gradient.entry_));
    if (sum_up(gradient, own_round)) ready.push_back(&start_round(p, std::move(gradient)));
  }
  show_waiting();
  std::vector<Round*> now;
  for (Round* round : ready) {
    if (can_show(*round)) {
      now.push_back(round);
    } else {
      ++weights_[round->parameter->weight.id].waiting;
      waiting_.push_back(round);
    }
  }
  show(now);
  reclaim();
}

bool Gradients::can_show(const Round& round) const {
  const ShardedWeight& w = round.parameter->weight;
  if (weights_[w.id].waiting > 0 && weights_[w.id].shown != round.number) return false;
  return round.number < collective::kShownRounds ||
         owners_behind(w, round.number - collective::kShownRounds + 1).empty();
}

std::vector<int> Gradients::owners_behind(const ShardedWeight& weight, uint64_t rounds) const {
  std::vector<int> behind;
  for (int q = 0; q < context_.ranks(); ++q)
    if (weight.owns(q) && folded_rounds(q, weight) < rounds) behind.push_back(q);
  return behind;
}

uint64_t Gradients::folded_rounds(int owner, const ShardedWeight& weight) const {
  const uint64_t word = context_.group.get(owner, Word::kFolded, weight.id);
  const uint64_t interval = collective::interval_of(word);
  const uint64_t rounds = collective::rounds_of(word);
  if (interval < context_.interval) return 0;
  const uint64_t shown = weights_[weight.id].shown;
  if (interval > context_.interval || (!closed_ && rounds > shown))
    context_.group.distrust(owner, Word::kFolded, weight.id,
                            fmt::format("rank {} has shown {} gradients of {} in interval {}, and may show more",
                                        context_.rank(), shown, tessera::quoted(weight.spec.name), context_.interval));
  return rounds;
}

void Gradients::show(std::span<Round* const> rounds) {
  if (rounds.empty()) return;
  device::Operation operation{.name = "produce", .subject = rounds.front()->parameter->name()};
  std::vector<uint32_t> slots;
  std::vector<uint64_t> values;
  collective::Group& group = context_.group;
  for (Round* round : rounds) {
    const ShardedWeight& w = round->parameter->weight;
    const uint64_t value = collective::round_word(context_.interval, round->number + 1);
    // Peers are told the place now; the word, which says that they may look, comes after the data.
    collective::ShownGradient gradient{.memory = {}, .dtype = w.gradient};
    if (round->gradient) {
      const auto bytes = static_cast<size_t>(w.gradient_bytes());
      gradient.memory = group.refer(round->gradient.data(), bytes);
      operation.accesses.push_back(device::read_of(round->gradient.data(), bytes));
    }
    group.set_gradient(w.id, context_.interval, round->number, gradient);
    operation.writes.push_back(group.edge(context_.rank(), Word::kProduced, w.id, value));
    slots.push_back(w.id);
    values.push_back(value);
    round->shown = true;
    weights_[w.id].shown = round->number + 1;
  }
  if (mutated(Mutation::kWordBeforeData) && !context_.compute->runs_inline()) {
    for (size_t i = 0; i < slots.size(); ++i) group.set(Word::kProduced, slots[i], values[i]);
  } else {
    operation.body = [&group, slots, values] { group.store(Word::kProduced, slots, values); };
    context_.compute->enqueue(std::move(operation));
  }
  fold(rounds);
}

void Gradients::fold(std::span<Round* const> rounds) {
  std::array<std::vector<collective::FoldPart>, kChains> parts;
  std::array<std::vector<Round*>, kChains> folded;
  for (Round* round : rounds) {
    Parameter& p = *round->parameter;
    const ShardedWeight& w = p.weight;
    weights_[w.id].folds = round->number + 1;
    if (w.rows.empty()) continue;
    const auto chain = static_cast<size_t>(w.chain);
    parts[chain].push_back({.slot = w.id,
                            .interval = context_.interval,
                            .round = mutated(Mutation::kFoldsOutOfOrder) ? round->number ^ 1 : round->number,
                            .begin_row = w.rows.begin,
                            .rows = w.rows.size(),
                            .total_rows = w.spec.rows,
                            .columns = w.columns(),
                            .gradient_dtype = w.gradient,
                            .accumulated = gradient_rows(p, context_.device),
                            .accumulated_dtype = p.gradient.dtype,
                            .first = std::exchange(p.gradient.empty, false) || mutated(Mutation::kFoldFromZero),
                            .scale = context_.scale(),
                            .contributors = &round->contributors,
                            .weight = p.name()});
    folded[chain].push_back(round);
  }
  for (size_t chain = 0; chain < kChains; ++chain) {
    if (parts[chain].empty()) continue;
    device::Stream& stream = context_.streams.reduce(static_cast<Chain>(chain));
    collective::fold(context_.group, stream, parts[chain]);
    const device::Event event = stream.record();
    for (Round* round : folded[chain]) round->folded = event;
    context_.counters.folds += static_cast<int64_t>(parts[chain].size());
  }
}

void Gradients::show_waiting() {
  std::vector<Round*> still;
  for (Round* round : std::exchange(waiting_, {})) {
    if (!can_show(*round)) {
      still.push_back(round);
      continue;
    }
    --weights_[round->parameter->weight.id].waiting;
    show({&round, 1});
  }
  waiting_ = std::move(still);
}

bool Gradients::folded_by_all(const Round& round) const {
  const ShardedWeight& w = round.parameter->weight;
  for (int q = 0; q < context_.ranks(); ++q) {
    if (mutated(Mutation::kGradientReturnedEarly) && q != context_.rank()) continue;
    if (w.owns(q) && folded_rounds(q, w) <= round.number) return false;
  }
  return true;
}

void Gradients::reclaim() {
  for (; first_unreturned_ < rounds_.size(); ++first_unreturned_) {
    Round& round = rounds_[first_unreturned_];
    if (!round.shown || !folded_by_all(round)) return;
    if (context_.device.recorder().on() && !mutated(Mutation::kGradientReturnedEarly)) {
      const ShardedWeight& w = round.parameter->weight;
      const uint64_t folded = collective::round_word(context_.interval, round.number + 1);
      for (int q = 0; q < context_.ranks(); ++q)
        if (w.owns(q))
          context_.device.wait_host(*context_.group.at_least(q, Word::kFolded, w.id, folded, "to fold"),
                                    context_.group.deadline());
    }
    round.returned = true;
    round.gradient = {};
  }
}

std::vector<Added> Gradients::added() {
  std::vector<Added> list = std::exchange(earlier_, {});
  for (; first_unreported_ < rounds_.size(); ++first_unreported_) {
    const Round& round = rounds_[first_unreported_];
    if (!round.shown) break;
    if (!mutated(Mutation::kHookBeforeAdd)) {
      if (!round.folded.done()) break;
      context_.device.wait_host(round.folded, context_.group.deadline());
    }
    const Parameter& p = *round.parameter;
    const bool owner = !p.weight.rows.empty();
    if (owner) {
      context_.counters.left_out += context_.ranks() - round.contributors;
      context_.note_host_read("added", p, &round.contributors, sizeof(round.contributors));
    }
    list.push_back({.weight = round.parameter->weight.id,
                    .round = static_cast<int64_t>(round.number),
                    .ranks = owner ? round.contributors : 0});
  }
  return list;
}

void Gradients::keep(std::vector<Added> added) {
  earlier_.insert(earlier_.end(), added.begin(), added.end());
}

void Gradients::note_order(WeightId weight) {
  // How many micro-batches the first interval has is not known.
  const size_t place = follows_ && first_interval_ ? order_.size() % planned_.size() : order_.size();
  if (follows_ && (place >= planned_.size() || planned_[place] != weight)) leave_plan();
  order_.push_back(weight);
}

void Gradients::leave_plan() {
  follows_ = false;
  context_.group.set(Word::kLeftPlan, collective::kWholeRank, ++left_plan_);
}

bool Gradients::somebody_left_plan() const {
  for (int q = 0; q < context_.ranks(); ++q)
    if (context_.group.get(q, Word::kLeftPlan, collective::kWholeRank) > left_before_[static_cast<size_t>(q)])
      return true;
  return false;
}

}  // namespace tessera::etp
