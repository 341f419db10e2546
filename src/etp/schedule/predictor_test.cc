#include "etp/schedule/predictor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "etp/schedule/plan.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<GatherCost> equal_costs(size_t count, int64_t bytes = 1) {
  std::vector<GatherCost> costs;
  for (size_t i = 0; i < count; ++i) costs.push_back({.row = {{0, bytes}}});
  return costs;
}

// Follows the rules of a caller and checks those of the predictor: a prefetch is issued once, taken once or dropped
// once, and serves its own weight and plane; memory is as counted.
class Caller {
 public:
  Caller(PrefetchOptions options, std::vector<GatherCost> costs) : predictor(options, std::move(costs)) {}

  // What is prefetched at this use, as weights.
  std::vector<uint32_t> use(const Consumption& use) {
    const UseDecision decision = predictor.observe(use);
    drop(decision.dropped);
    int64_t live = bytes(use);
    on_demand = !decision.taken;
    if (decision.taken) {
      EXPECT_TRUE(pending_.at(*decision.taken).same_gather(use));
      pending_.erase(*decision.taken);
    }
    std::vector<uint32_t> weights = issue(decision.issue);
    for (const auto& [id, waiting] : pending_) live += bytes(waiting);
    EXPECT_EQ(predictor.live_bytes(), live);
    const auto& cap = predictor.options().cap_bytes;
    if (cap) {
      EXPECT_LE(live, std::max(*cap, bytes(use)));
    }
    return weights;
  }
  std::vector<uint32_t> use(uint32_t weight, Phase phase = Phase::kForward, uint32_t micro_batch = 0) {
    return use({.weight = weight, .phase = phase, .micro_batch = micro_batch});
  }
  void uses(const std::vector<uint32_t>& weights, Phase phase = Phase::kForward, uint32_t micro_batch = 0) {
    for (const uint32_t weight : weights) use(weight, phase, micro_batch);
  }
  void update() {
    drop(predictor.update());
    EXPECT_TRUE(pending_.empty());
    EXPECT_EQ(predictor.live_bytes(), 0);
  }
  std::vector<uint32_t> start() { return issue(predictor.start()); }
  void step(const std::vector<uint32_t>& weights) {
    start();
    uses(weights);
    update();
  }
  // Counters since the last call.
  PredictorCounters counted() {
    const PredictorCounters& now = predictor.counters();
    const PredictorCounters since{
        now.uses - before_.uses,     now.on_demand - before_.on_demand, now.mispredicted - before_.mispredicted,
        now.issued - before_.issued, now.wasted - before_.wasted,       now.refused - before_.refused};
    before_ = now;
    return since;
  }

  Predictor predictor;
  bool on_demand = false;

 private:
  int64_t bytes(const Consumption& use) const { return predictor.costs()[use.weight].bytes(use.plane); }
  void drop(std::span<const uint64_t> ids) {
    for (const uint64_t id : ids) EXPECT_EQ(pending_.erase(id), 1U);
  }
  std::vector<uint32_t> issue(std::span<const Prefetch> prefetches) {
    std::vector<uint32_t> weights;
    for (const Prefetch& prefetch : prefetches) {
      EXPECT_TRUE(pending_.emplace(prefetch.id, prefetch.use).second);
      weights.push_back(prefetch.use.weight);
    }
    return weights;
  }

  std::map<uint64_t, Consumption> pending_;
  PredictorCounters before_;
};

PredictorCounters counters(int64_t uses, int64_t on_demand, int64_t mispredicted, int64_t issued, int64_t wasted) {
  return {uses, on_demand, mispredicted, issued, wasted, 0};
}

TEST(Predictor, TheFirstPassRunsOnDemandAndTheNextIsPredicted) {
  Caller caller({}, equal_costs(3));
  EXPECT_THAT(caller.start(), IsEmpty());
  caller.uses({0, 1, 2});
  caller.update();
  EXPECT_EQ(caller.counted(), counters(3, 3, 0, 0, 0));
  EXPECT_THAT(caller.start(), ElementsAre(0));
  EXPECT_THAT(caller.use(0), ElementsAre(1));
  EXPECT_THAT(caller.use(1), ElementsAre(2));
  EXPECT_THAT(caller.use(2), IsEmpty());
  caller.update();
  EXPECT_EQ(caller.counted(), counters(3, 0, 0, 3, 0));
  EXPECT_EQ(caller.predictor.last_step().size(), 3U);
  EXPECT_EQ(caller.predictor.next({.weight = 1})->weight, 2U);
  EXPECT_EQ(caller.predictor.prev({.weight = 1})->weight, 0U);
  EXPECT_EQ(caller.predictor.next({.weight = 2}), std::nullopt);
  EXPECT_EQ(caller.predictor.prev({.weight = 0}), std::nullopt);
}

TEST(Predictor, AWrongPredictionCostsOneWastedAndOneOnDemandGather) {
  Caller caller({}, equal_costs(5));
  for (int i = 0; i < 3; ++i) caller.step({0, 1, 2, 3});
  caller.counted();
  caller.step({0, 4, 2, 3});  // 4 in the place of 1; what follows it is not known yet
  EXPECT_EQ(caller.counted(), counters(4, 2, 1, 3, 1));
  caller.step({0, 4, 2, 3});
  EXPECT_EQ(caller.counted(), counters(4, 0, 0, 4, 0));
  caller.step({0, 1, 2, 3});  // back: where 1 leads is known
  EXPECT_EQ(caller.counted(), counters(4, 1, 1, 4, 1));
}

TEST(Predictor, ASkippedExpertAndOneThatComesBack) {
  Caller caller({}, equal_costs(5));
  for (int i = 0; i < 2; ++i) caller.step({0, 1, 2, 3, 4});
  caller.counted();
  caller.step({0, 1, 3, 4});
  EXPECT_EQ(caller.counted(), counters(4, 1, 1, 4, 1));
  caller.step({0, 1, 3, 4});
  EXPECT_EQ(caller.counted(), counters(4, 0, 0, 4, 0));
  caller.step({0, 1, 2, 3, 4});  // the prefetch of 3 still lies ahead, and serves it
  EXPECT_EQ(caller.counted(), counters(5, 1, 1, 4, 0));
}

TEST(Predictor, TiedWeightsAndModulesThatRunSeveralTimesHaveAPlaceForEachUse) {
  Caller caller({.distance = 2}, equal_costs(4));
  const std::vector<uint32_t> order{0, 1, 1, 1, 2, 1, 3, 0};
  caller.step(order);
  caller.counted();
  for (int i = 0; i < 3; ++i) {
    caller.step(order);
    EXPECT_EQ(caller.counted(), counters(8, 0, 0, 8, 0));
  }
  caller.step(
      {0, 1, 1, 2, 1, 3, 0});  // one round less; the prefetches of 2 and 1 are right, that of the third 1 serves
  EXPECT_EQ(caller.counted().mispredicted, 1);
  caller.step({0, 1, 1, 2, 1, 3, 0});
  EXPECT_EQ(caller.counted(), counters(7, 0, 0, 7, 0));
}

TEST(Predictor, MicroBatchesAndPhasesAreToldApart) {
  Caller caller({}, equal_costs(3));
  const auto step = [&](uint32_t micro_batches) {
    caller.start();
    for (uint32_t position = 0; position < micro_batches; ++position) {
      caller.uses({0, 1, 2}, Phase::kForward, position);
      for (const uint32_t weight : {2U, 1U, 0U}) {  // checkpointing runs each layer's forward again
        caller.use(weight, Phase::kRecompute, position);
        caller.use(weight, Phase::kBackward, position);
      }
    }
    caller.update();
  };
  step(2);  // the second micro-batch is expected to go as the first, and a third to follow
  EXPECT_EQ(caller.counted(), counters(18, 9 + 1, 0, 8 + 1, 1));
  step(2);
  EXPECT_EQ(caller.counted(), counters(18, 0, 0, 18, 0));
  step(1);  // the prefetch for the next micro-batch is dropped by the update
  EXPECT_EQ(caller.counted(), counters(9, 0, 0, 10, 1));
  step(3);  // the end was expected twice; position 2 is new, and goes as position 1
  EXPECT_EQ(caller.counted(), counters(27, 1 + 1, 0, 9 + 8 + 8 + 1, 1));
  step(3);
  EXPECT_EQ(caller.counted(), counters(27, 0, 0, 27, 0));
}

// One micro-batch of a model of three layers.
constexpr size_t kUsesOfMicroBatch = 6;
void micro_batch(Caller& caller, uint32_t position) {
  caller.uses({0, 1, 2}, Phase::kForward, position);
  caller.uses({2, 1, 0}, Phase::kBackward, position);
}

TEST(Predictor, TheFirstStepIsPrefetchedFromItsSecondMicroBatchOn) {
  for (int distance = 1; distance <= 4; ++distance) {
    Caller caller({.distance = distance}, equal_costs(3));
    EXPECT_THAT(caller.start(), IsEmpty());
    micro_batch(caller, 0);
    EXPECT_EQ(caller.counted(), counters(6, 6, 0, 0, 0));
    caller.use(0, Phase::kForward, 1);  // nothing says yet that there is a second one
    EXPECT_TRUE(caller.on_demand);
    caller.uses({1, 2}, Phase::kForward, 1);
    caller.uses({2, 1, 0}, Phase::kBackward, 1);
    EXPECT_EQ(caller.counted(), counters(6, 1, 0, 5 + distance, 0));
    for (uint32_t position = 2; position < 5; ++position) micro_batch(caller, position);
    EXPECT_EQ(caller.counted(), counters(18, 0, 0, 18, 0));
    caller.update();
    EXPECT_EQ(caller.counted(), counters(0, 0, 0, 0, distance));
    caller.start();
    for (uint32_t position = 0; position < 5; ++position) micro_batch(caller, position);
    caller.update();
    EXPECT_EQ(caller.counted(), counters(30, 0, 0, 30, 0));
  }
}

TEST(Predictor, WithoutPrefetchTheSecondMicroBatchIsNotPredicted) {
  for (const PrefetchOptions& options :
       {PrefetchOptions{.weight_prefetch = false}, PrefetchOptions{.distance = 0, .expert_distance = 0}}) {
    Caller caller(options, equal_costs(3));
    for (uint32_t position = 0; position < 3; ++position) micro_batch(caller, position);
    EXPECT_EQ(caller.counted(), counters(18, 18, 0, 0, 0));
  }
}

TEST(Predictor, InterleavedMicroBatchesOfAFirstStepArePredictedToo) {
  Caller caller({}, equal_costs(3));
  const auto forward = [&](uint32_t position) { caller.uses({0, 1, 2}, Phase::kForward, position); };
  const auto backward = [&](uint32_t position) { caller.uses({2, 1, 0}, Phase::kBackward, position); };
  forward(0);
  forward(1);
  EXPECT_EQ(caller.counted().on_demand, 3 + 1);
  backward(0);  // where another forward was expected, whose prefetch of 0 serves
  EXPECT_EQ(caller.counted(), counters(3, 2, 1, 0, 0));
  for (uint32_t position = 2; position < 6; ++position) {
    forward(position);
    backward(position - 1);
    EXPECT_EQ(caller.counted().on_demand, position == 2 ? 1 : 0) << position;
  }
}

TEST(Predictor, AUseThatComesSeveralTimesIsPredictedByItsPlaceInTheMicroBatchBefore) {
  Caller caller({}, equal_costs(4));
  caller.uses({0, 1, 0, 2, 0, 3}, Phase::kForward, 0);
  caller.counted();
  caller.uses({0, 1, 0, 2, 0, 3}, Phase::kForward, 1);
  EXPECT_EQ(caller.counted(), counters(6, 1, 0, 6, 0));
  caller.uses({0, 1, 2, 0, 3}, Phase::kForward, 2);  // the second 0 is left out
  EXPECT_EQ(caller.counted(), counters(5, 1, 1, 4, 0));
  caller.uses({0, 1, 0, 0, 2, 0, 3}, Phase::kForward, 3);  // once more than ever
  EXPECT_LE(caller.counted().on_demand, 4);
  caller.update();
  caller.start();
  for (const auto& [position, uses] : std::map<uint32_t, std::vector<uint32_t>>{
           {0, {0, 1, 0, 2, 0, 3}}, {1, {0, 1, 0, 2, 0, 3}}, {2, {0, 1, 2, 0, 3}}, {3, {0, 1, 0, 0, 2, 0, 3}}})
    caller.uses(uses, Phase::kForward, position);
  caller.update();
  EXPECT_EQ(caller.counted().mispredicted, 0);
}

TEST(Predictor, EvaluationInEachMicroBatchOfAFirstStepIsPredicted) {
  Caller caller({}, equal_costs(4));
  for (uint32_t position = 0; position < 3; ++position) {
    caller.counted();
    caller.uses({0, 1}, Phase::kForward, position);
    caller.uses({2, 3}, Phase::kForward, kEvaluation);
    caller.uses({1, 0}, Phase::kBackward, position);
    EXPECT_EQ(caller.counted().on_demand, std::vector({6, 1, 0})[position]) << position;
  }
}

TEST(Predictor, AnEarlyStopOfACheckpointLeavesNothingBehind) {
  Caller caller({}, equal_costs(3));
  const auto step = [&](bool whole) {
    caller.start();
    caller.uses({0, 1, 2}, Phase::kForward);
    caller.uses(whole ? std::vector<uint32_t>{0, 1, 2} : std::vector<uint32_t>{0, 1}, Phase::kRecompute);
    caller.uses({2, 1, 0}, Phase::kBackward);
    caller.update();
  };
  step(true);
  step(true);
  caller.counted();
  step(false);
  // The prefetch for the recomputation serves the backward use: for a plain dtype both are one plane.
  EXPECT_EQ(caller.counted(), counters(8, 0, 0, 8, 0));
  step(false);
  EXPECT_EQ(caller.counted(), counters(8, 0, 0, 8, 0));
}

TEST(Predictor, EvaluationBetweenStepsChangesNoTrainingOrder) {
  for (const bool told : {false, true}) {
    Caller caller({}, equal_costs(4));
    const auto train = [&] {
      caller.start();
      caller.uses({0, 1, 2, 3});
      caller.uses({3, 2, 1}, Phase::kBackward);
      caller.update();
    };
    const auto evaluate = [&] {
      if (told) caller.predictor.new_pass();
      caller.uses({0, 1, 2, 3}, Phase::kForward, kEvaluation);
    };
    train();
    train();
    for (int i = 0; i < 4; ++i) evaluate();
    train();
    caller.counted();
    for (int i = 0; i < 5; ++i) {
      evaluate();
      evaluate();
      train();
    }
    // An update would drop what is prefetched; here training follows evaluation without one, as it did last time.
    EXPECT_EQ(caller.counted().mispredicted, 0);
    const size_t places = caller.predictor.last_step().size();
    EXPECT_EQ(places, 4U + 4 + 7);
  }
}

TEST(Predictor, InferenceWithoutUpdatesIsPredictedRoundAndRound) {
  Caller caller({.distance = 2}, equal_costs(5));
  for (int i = 0; i < 2; ++i) caller.uses({0, 1, 2, 3, 4}, Phase::kForward, kEvaluation);
  caller.counted();
  for (int i = 0; i < 100; ++i) caller.uses({0, 1, 2, 3, 4}, Phase::kForward, kEvaluation);
  EXPECT_EQ(caller.counted(), counters(500, 0, 0, 500, 0));
}

TEST(Predictor, AChangedModelIsLearned) {
  Caller caller({}, equal_costs(3));
  for (int i = 0; i < 2; ++i) caller.step({0, 1, 2});
  caller.counted();
  const uint32_t inserted = caller.predictor.add({.row = {{0, 1}}});
  caller.step({0, inserted, 1, 2});  // the prefetch of 1 waits until something is known
  EXPECT_EQ(caller.counted(), counters(4, 1, 1, 3, 0));
  caller.step({0, inserted, 1, 2});
  EXPECT_EQ(caller.counted(), counters(4, 0, 0, 4, 0));
  EXPECT_THROW(caller.use(4), Error);
}

TEST(Predictor, WithoutPrefetchNothingIsPredicted) {
  Caller caller({.weight_prefetch = false, .distance = 3}, equal_costs(3));
  for (const auto& order : {std::vector<uint32_t>{0, 1, 2}, {0, 2, 1}, {2, 1, 0}}) caller.step(order);
  EXPECT_EQ(caller.counted(), counters(9, 9, 0, 0, 0));
  caller.predictor.set_options({});
  caller.step({2, 1, 0});
  EXPECT_EQ(caller.counted(), counters(3, 0, 0, 3, 0));
}

struct RandomModel {
  explicit RandomModel(unsigned seed) : random(seed) {
    for (uint32_t i = 0; i < 8; ++i) {
      GatherCost cost{.chain = static_cast<Chain>(below(2)), .experts = below(3) == 0, .row = {{2 * i, 1 + below(64)}}};
      if (below(2) == 0) cost.column = {{2 * i + 1, 1 + below(64)}};
      costs.push_back(cost);
    }
    options = {.distance = below(4), .expert_distance = below(4)};
    if (below(2) == 0) options.cap_bytes = below(200);
  }
  int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }
  std::vector<Consumption> step() {
    std::vector<Consumption> uses;
    for (int i = 1 + below(40); i > 0; --i)
      uses.push_back({.weight = static_cast<uint32_t>(below(8)),
                      .plane = static_cast<Plane>(below(2)),
                      .phase = static_cast<Phase>(below(3)),
                      .micro_batch = static_cast<uint32_t>(below(3))});
    return uses;
  }

  std::mt19937 random;
  std::vector<GatherCost> costs;
  PrefetchOptions options;
};

TEST(Predictor, AnOrderThatStaysIsPrefetchedAsPlanned) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    RandomModel model(seed);
    const std::vector<Consumption> order = model.step();
    const PrefetchPlan plan = plan_prefetch(order, model.costs, model.options);
    Caller caller(model.options, model.costs);
    for (const Consumption& use : order) caller.use(use);
    caller.update();
    for (int repeat = 0; repeat < 2; ++repeat) {
      caller.counted();
      const auto weights = [&](const std::vector<uint32_t>& uses) {
        std::vector<uint32_t> all;
        for (const uint32_t i : uses) all.push_back(order[i].weight);
        return all;
      };
      ASSERT_EQ(caller.start(), weights(plan.at_start));
      for (size_t i = 0; i < order.size(); ++i) {
        ASSERT_EQ(caller.use(order[i]), weights(plan.uses[i].prefetches)) << i;
        ASSERT_EQ(caller.on_demand, plan.uses[i].on_demand) << i;
        ASSERT_EQ(caller.predictor.live_bytes(), plan.uses[i].live_bytes) << i;
      }
      caller.update();
      const PredictorCounters counted = caller.counted();
      ASSERT_EQ(counted.mispredicted, 0);
      ASSERT_EQ(counted.wasted, plan.wasted);
      ASSERT_EQ(counted.on_demand, plan.on_demand);
    }
  }
}

// Micro-batches that go as the one before, but for what is left out, added and exchanged at random.
std::vector<Consumption> step_of_micro_batches(RandomModel& model, int changes) {
  std::vector<Consumption> step;
  std::vector<Consumption> uses = model.step();
  for (uint32_t position = 0; position < 4; ++position) {
    for (Consumption& use : uses) use.micro_batch = use.micro_batch == kEvaluation ? kEvaluation : position;
    step.insert(step.end(), uses.begin(), uses.end());
    for (int i = 0; i < changes && !uses.empty(); ++i) {
      const auto at = static_cast<size_t>(model.below(static_cast<int>(uses.size())));
      const auto other = static_cast<size_t>(model.below(static_cast<int>(uses.size())));
      const auto where = uses.begin() + static_cast<std::ptrdiff_t>(at);
      switch (model.below(4)) {
        case 0:
          uses.erase(where);
          break;
        case 1:
          uses.insert(where, Consumption(uses[other]));
          break;
        case 2:
          std::swap(uses[at], uses[other]);
          break;
        default:
          uses[at].micro_batch = kEvaluation;
      }
    }
  }
  return step;
}

TEST(Predictor, MicroBatchesThatGoAsTheFirstAreGatheredAheadInTheFirstStep) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    RandomModel model(seed);
    model.options.distance = model.options.expert_distance = 1 + model.below(4);
    model.options.cap_bytes = std::nullopt;
    const std::vector<Consumption> step = step_of_micro_batches(model, 0);
    std::set<Chain> chains;
    Caller caller(model.options, model.costs);
    for (size_t i = 0; i < step.size(); ++i) {
      caller.use(step[i]);
      if (step[i].micro_batch == 0) continue;
      // The first of each chain in the second micro-batch.
      const bool first = chains.insert(model.costs[step[i].weight].chain).second;
      ASSERT_EQ(caller.on_demand, first) << i;
    }
    EXPECT_EQ(caller.counted().mispredicted, 0);
  }
}

TEST(Predictor, MicroBatchesThatDifferKeepTheBooksAndAreLearned) {
  for (unsigned seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(seed);
    RandomModel model(seed);
    // What a chain used at last is expected to come again, however many steps leave it out, and takes its memory.
    if (seed % 2 == 0)
      for (GatherCost& cost : model.costs) cost.chain = Chain::kUngraphed;
    Caller caller(model.options, model.costs);
    for (int change = 0; change < 3; ++change) {
      std::vector<Consumption> step = step_of_micro_batches(model, 1 + model.below(6));
      for (const Consumption& use : step) caller.use(use);
      caller.update();
      // Evaluation amid a step is taken for a pass of its own, by which what a step repeats is not told apart.
      std::erase_if(step, [](const Consumption& use) { return use.micro_batch == kEvaluation; });
      const PrefetchPlan plan = plan_prefetch(step, model.costs, model.options);
      const auto run = [&] {
        caller.start();
        for (const Consumption& use : step) caller.use(use);
        caller.update();
      };
      run();
      caller.counted();
      run();
      const PredictorCounters counted = caller.counted();
      ASSERT_EQ(counted.mispredicted, 0);
      if (seed % 2 == 0) {
        ASSERT_EQ(counted.on_demand, plan.on_demand);
        ASSERT_EQ(counted.wasted, plan.wasted);
      }
    }
    const PredictorCounters& all = caller.predictor.counters();
    ASSERT_EQ(all.issued, all.wasted + (all.uses - all.on_demand));
  }
}

TEST(Predictor, AnyOrderKeepsTheBooks) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    RandomModel model(seed);
    Caller caller(model.options, model.costs);
    for (int step = 0; step < 8; ++step) {
      if (model.below(2) == 0) caller.start();
      for (const Consumption& use : model.step()) caller.use(use);
      if (model.below(3) > 0) caller.update();
      if (model.below(5) == 0) caller.predictor.new_pass();
    }
    caller.update();
    const PredictorCounters& all = caller.predictor.counters();
    ASSERT_EQ(all.issued, all.wasted + (all.uses - all.on_demand));
  }
}

TEST(Predictor, NothingIsExpectedAtTheBeginningOfAStepThatIsReplayed) {
  Caller caller({.distance = 2}, equal_costs(3));
  caller.step({0, 1, 2});
  EXPECT_THAT(caller.start(), ElementsAre(0, 1));
  caller.predictor.replayed(Chain::kUngraphed);
  EXPECT_EQ(caller.use(0), (std::vector<uint32_t>{2}));  // the rest of a step is as before
  caller.uses({1, 2});
  caller.update();
  EXPECT_THAT(caller.start(), ElementsAre(0, 1));
  caller.predictor.replayed(Chain::kUngraphed);
  caller.update();
  EXPECT_THAT(caller.start(), IsEmpty());
  caller.uses({0, 1, 2});
  caller.update();
  EXPECT_THAT(caller.start(), ElementsAre(0, 1));
}

}  // namespace
}  // namespace tessera::etp
