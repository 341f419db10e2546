// Over a back end whose gathers and folds must match, ranks that plan different orders are refused before a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "base/testing.h"
#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/virtual/virtual_world.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using std::chrono::seconds;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 3;

// What one rank does with three weights, step after step.
struct Program {
  RuntimeOptions options = {.prefetch = PrefetchMode::kOn};
  std::vector<std::vector<WeightId>> steps = {{0, 1, 2}, {0, 1, 2}, {0, 1, 2}};
  bool backwards = false;  // gradients, in the order of the uses otherwise
  bool drains = false;     // before each update
  bool experts = false;    // instead of steps: two more weights, as a list of experts
};

void train(Runtime& runtime, const Program& program) {
  std::vector<WeightId> weights;
  for (const char* name : {"a", "b", "c"}) weights.push_back(runtime.add({.name = name, .rows = 50, .columns = 4}));
  if (program.experts) {
    for (const char* name : {"d", "e"}) weights.push_back(runtime.add({.name = name, .rows = 50, .columns = 4}));
    runtime.add_experts(std::span(weights).last(2));
  }
  runtime.start();
  if (program.experts) return;
  for (std::vector<WeightId> step : program.steps) {
    for (const WeightId w : step) runtime.acquire(w, Phase::kForward);
    if (program.backwards) std::ranges::reverse(step);
    for (const WeightId w : step) produce_ones(runtime, w);
    if (program.drains) runtime.drain();
    runtime.update(weights, [] {});
  }
}

// How each of the ranks ends, of which the last one runs `other`.
std::vector<std::string> run(const Program& program, const Program& other, bool matched_order = true) {
  std::vector<std::string> errors;
  for (const uint64_t seed : {1, 2, 3}) {
    device::VirtualWorld world(seed);
    collective::InProcessExchange exchange(kRanks);
    std::vector<std::string> ended(kRanks);
    world.run(kRanks, [&](int rank) {
      device::Device& device = world.device(rank);
      ShardGroup group(
          collective::Group::form(exchange.of_rank(rank, device, seconds(60)), {.rank = rank,
                                                                                .size = kRanks,
                                                                                .name = "matched",
                                                                                .device = &device,
                                                                                .slots = 16,
                                                                                .in_process = true,
                                                                                .matched_order = matched_order}));
      Runtime runtime(group, rank == kRanks - 1 ? other.options : program.options);
      ended[static_cast<size_t>(rank)] = error_of([&] { train(runtime, rank == kRanks - 1 ? other : program); });
    });
    errors.insert(errors.end(), ended.begin(), ended.end());
  }
  return errors;
}

TEST(MatchedOrder, EqualPlansRun) {
  EXPECT_THAT(run({}, {}), Each("(no error)"));
  const Program changing{.steps = {{0, 1, 2}, {2, 1}, {}, {1, 0, 1}}, .drains = true};
  EXPECT_THAT(run(changing, changing), Each("(no error)"));
}

TEST(MatchedOrder, AnotherOrderOfUsesIsRefusedBeforeTheNextStep) {
  EXPECT_THAT(run({}, {.steps = {{0, 1, 2}, {0, 2, 1}, {0, 2, 1}}}),
              Each(AllOf(HasSubstr("move 2 of the next step is \"gather row of b\" on rank 0 "),
                         HasSubstr(" and \"gather row of c\" on rank 2 "))));
}

TEST(MatchedOrder, AUseThatOneRankLacksIsRefused) {
  EXPECT_THAT(run({.steps = {{0, 1}, {0, 1}}}, {.steps = {{0}, {0}}}),
              Each(HasSubstr("move 2 of the next step is \"gather row of b\" on rank 0 ")));
}

TEST(MatchedOrder, AnotherOrderOfGradientsIsRefused) {
  for (const bool drains : {false, true})
    EXPECT_THAT(run({.drains = drains}, {.backwards = true, .drains = drains}),
                Each(AllOf(HasSubstr("move 4 of the next step is \"fold a\" on rank 0 "),
                           HasSubstr(" and \"fold c\" on rank 2 "))));
}

TEST(MatchedOrder, OptionsThatLeadToAnotherOrderAreRefusedAtTheStart) {
  // Experts are gathered two uses ahead; where others are not gathered ahead at all, before those.
  EXPECT_THAT(run({.experts = true}, {.options = {.prefetch = PrefetchMode::kOn, .distance = 0}, .experts = true}),
              Each(HasSubstr("\"gather row of c\" on rank 0 (")));
  EXPECT_THAT(run({.experts = true}, {.options = {.prefetch = PrefetchMode::kOn, .distance = 2}, .experts = true}),
              Each("(no error)"));
}

TEST(MatchedOrder, RanksThatPullMayDiffer) {
  EXPECT_THAT(run({}, {.steps = {{0, 1, 2}, {0, 2, 1}, {2}}}, false), Each("(no error)"));
}

}  // namespace
}  // namespace tessera::etp
