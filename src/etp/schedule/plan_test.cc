#include "etp/schedule/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Weights of one buffer each; every one has a key of its own, or that of its size.
std::vector<GatherCost> costs_of(std::vector<int64_t> sizes, bool by_size = false) {
  std::vector<GatherCost> costs;
  for (uint32_t i = 0; i < sizes.size(); ++i)
    costs.push_back({.row = {{by_size ? static_cast<uint32_t>(sizes[i]) : i, sizes[i]}}});
  return costs;
}

std::vector<Consumption> forward(std::vector<uint32_t> weights) {
  std::vector<Consumption> uses;
  for (const uint32_t weight : weights) uses.push_back({.weight = weight});
  return uses;
}

TEST(Plan, TheNextUseIsGatheredWhileThisOneRuns) {
  const PrefetchPlan plan = plan_prefetch(forward({0, 1, 2}), costs_of({10, 20, 40}), {});
  EXPECT_THAT(plan.at_start, ElementsAre(0));
  EXPECT_THAT(plan.uses[0].prefetches, ElementsAre(1));
  EXPECT_THAT(plan.uses[1].prefetches, ElementsAre(2));
  EXPECT_THAT(plan.uses[2].prefetches, IsEmpty());  // an update follows
  EXPECT_EQ(plan.uses[0].live_bytes, 30);
  EXPECT_EQ(plan.uses[1].live_bytes, 60);
  EXPECT_EQ(plan.uses[2].live_bytes, 40);
  EXPECT_EQ(plan.peak_bytes, 60);
  EXPECT_EQ(plan.on_demand, 0);
  EXPECT_EQ(plan.uses[1].prev, 0U);
  EXPECT_EQ(plan.uses[1].next, 2U);
  EXPECT_EQ(plan.uses[0].prev, std::nullopt);
  EXPECT_EQ(plan.uses[2].next, std::nullopt);
}

TEST(Plan, PoolsKeepDistancePlusOneOfEachKey) {
  const auto costs = costs_of({10, 10, 10, 10, 10}, true);
  for (const int distance : {0, 1, 2, 3}) {
    const PrefetchPlan plan =
        plan_prefetch(forward({0, 1, 2, 3, 4}), costs, {.distance = distance, .expert_distance = 0});
    EXPECT_THAT(plan.forecast(), ElementsAre(KeyPeak{10, distance + 1, 10 * (distance + 1)}));
    EXPECT_EQ(plan.pool_bytes(), 10 * (distance + 1));
  }
  const PrefetchPlan off = plan_prefetch(forward({0, 1, 2, 3, 4}), costs, {.weight_prefetch = false, .distance = 3});
  EXPECT_EQ(off.on_demand, 5);
  EXPECT_EQ(off.peak_bytes, 10);
}

TEST(Plan, ACapHoldsToTheByte) {
  const auto costs = costs_of({10, 20, 40});
  const auto on_demand = [&](int64_t cap) {
    const PrefetchPlan plan = plan_prefetch(forward({0, 1, 2}), costs, {.cap_bytes = cap});
    EXPECT_LE(plan.peak_bytes, std::max<int64_t>(cap, 40));
    std::vector<bool> all;
    for (const PlannedUse& use : plan.uses) all.push_back(use.on_demand);
    return all;
  };
  EXPECT_THAT(on_demand(60), ElementsAre(false, false, false));
  EXPECT_THAT(on_demand(59), ElementsAre(false, false, true));
  EXPECT_THAT(on_demand(30), ElementsAre(false, false, true));
  EXPECT_THAT(on_demand(29), ElementsAre(false, true, true));
  EXPECT_THAT(on_demand(10), ElementsAre(false, true, true));
  EXPECT_THAT(on_demand(9), ElementsAre(true, true, true));
  EXPECT_THAT(on_demand(0), ElementsAre(true, true, true));
}

TEST(Plan, ListsOfExpertsAreGatheredFurtherAhead) {
  auto costs = costs_of({1, 1, 1, 1});
  costs[3] = {.experts = true, .row = {{7, 5}, {8, 6}}};
  const PrefetchPlan plan = plan_prefetch(forward({0, 1, 3, 2}), costs, {});
  EXPECT_THAT(plan.at_start, ElementsAre(0));
  EXPECT_THAT(plan.uses[0].prefetches, ElementsAre(1, 2));
  EXPECT_THAT(plan.uses[1].prefetches, IsEmpty());
  EXPECT_THAT(plan.uses[2].prefetches, ElementsAre(3));
  EXPECT_EQ(plan.uses[0].live_bytes, 1 + 1 + 11);
}

TEST(Plan, WhatIsGatheredOnDemandTakesTheCapFromFartherPrefetches) {
  auto costs = costs_of({1, 1, 4});
  costs[1] = {.experts = true, .row = {{9, 6}}};
  // The experts are gathered two uses ahead, before weight 2, which then has no room beside them.
  const PrefetchPlan plan = plan_prefetch(forward({0, 2, 1}), costs, {.cap_bytes = 8});
  EXPECT_THAT(plan.uses[0].prefetches, ElementsAre(1));
  EXPECT_EQ(plan.wasted, 0);
  const PrefetchPlan three =
      plan_prefetch(forward({0, 0, 2, 1}), costs, {.distance = 1, .expert_distance = 3, .cap_bytes = 8});
  EXPECT_THAT(three.uses[0].prefetches, ElementsAre(1, 3));
  EXPECT_TRUE(three.uses[2].on_demand);
  EXPECT_EQ(three.wasted, 1);
  EXPECT_TRUE(three.uses[3].on_demand);
  EXPECT_LE(three.peak_bytes, 8);
}

TEST(Plan, ChainsNeverLinkAcross) {
  auto costs = costs_of({1, 1, 1, 1});
  costs[1].chain = costs[3].chain = Chain::kGraphed;
  const PrefetchPlan plan = plan_prefetch(forward({0, 1, 2, 3}), costs, {});
  EXPECT_THAT(plan.at_start, ElementsAre(1, 0));  // the graphed chain first
  EXPECT_EQ(plan.uses[0].next, 2U);
  EXPECT_EQ(plan.uses[1].next, 3U);
  EXPECT_THAT(plan.uses[0].prefetches, ElementsAre(2));
  EXPECT_THAT(plan.uses[1].prefetches, ElementsAre(3));
  const std::vector<std::string> names{"a.embedding", "b", "c", "d"};
  EXPECT_EQ(link_table(plan, Chain::kGraphed, names, costs),
            "ETP chain GRAPHED: 2 uses\n  b (forward row): prev -, next d\n  d (forward row): prev b, next -");
  EXPECT_EQ(link_table(plan, Chain::kUngraphed, names, costs),
            "ETP chain UNGRAPHED: 2 uses\n  a.embedding (forward row): prev -, next c\n"
            "  c (forward row): prev a.embedding, next -");
}

TEST(Plan, AnExpectedStepGoesForwardAndBack) {
  auto costs = costs_of({1, 1, 1});
  costs[2].column = {{9, 1}};
  const std::vector<std::string> names{"embedding", "a", "b"};
  const auto text = [&](const std::vector<Consumption>& uses) {
    std::string all;
    for (const Consumption& use : uses)
      all += names[use.weight].substr(0, 1) + std::string(to_string(use.phase)).substr(0, 1) +
             std::string(to_string(use.plane)).substr(0, 1) + std::to_string(use.micro_batch) + " ";
    return all;
  };
  EXPECT_EQ(text(expected_step({.names = names, .costs = costs, .micro_batches = 2})),
            "efr0 afr0 bfr0 bbc0 abr0 efr1 afr1 bfr1 bbc1 abr1 ");
  EXPECT_EQ(text(expected_step({.names = names, .costs = costs, .recompute = true})),
            "efr0 afr0 bfr0 brr0 bbc0 arr0 abr0 ");
  EXPECT_EQ(text(expected_step({.names = names, .costs = costs, .backward = false})), "efr0 afr0 bfr0 ");
}

TEST(Plan, MistakesAreRefused) {
  const auto refused = [](const PrefetchOptions& options, std::vector<uint32_t> uses) {
    try {
      plan_prefetch(forward(std::move(uses)), costs_of({1, 1}), options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused({.distance = -1}, {}), HasSubstr("distance is -1"));
  EXPECT_THAT(refused({.expert_distance = 65}, {}), HasSubstr("expert_distance is 65"));
  EXPECT_THAT(refused({.cap_bytes = -1}, {}), HasSubstr("cap_bytes is -1"));
  EXPECT_THAT(refused({}, {0, 2}), HasSubstr("use 1 is of weight 2"));
}

// Without a cap: a use is prefetched at the use of its chain that is its distance ahead, or at the start.
TEST(Plan, OfRandomStepsIsWhatTheDefinitionSays) {
  std::mt19937 random(5);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 300; ++round) {
    std::vector<GatherCost> costs;
    for (uint32_t i = 0; i < 6; ++i)
      costs.push_back({.chain = static_cast<Chain>(below(2)), .experts = below(3) == 0, .row = {{i, 1 + below(100)}}});
    std::vector<Consumption> uses;
    for (int i = below(30); i >= 0; --i) uses.push_back({.weight = static_cast<uint32_t>(below(6))});
    const PrefetchOptions options{.distance = below(4), .expert_distance = below(4)};
    const PrefetchPlan plan = plan_prefetch(uses, costs, options);

    std::map<Chain, std::vector<uint32_t>> chains;
    for (uint32_t i = 0; i < uses.size(); ++i) chains[costs[uses[i].weight].chain].push_back(i);
    std::map<uint32_t, int> issued_at;  // -1: at the start
    for (const uint32_t i : plan.at_start) issued_at[i] = -1;
    for (uint32_t i = 0; i < uses.size(); ++i)
      for (const uint32_t j : plan.uses[i].prefetches) ASSERT_TRUE(issued_at.emplace(j, static_cast<int>(i)).second);
    std::vector<int64_t> live(uses.size() + 1);  // from -1
    for (const auto& [chain, order] : chains)
      for (size_t k = 0; k < order.size(); ++k) {
        const GatherCost& cost = costs[uses[order[k]].weight];
        const auto reach = static_cast<size_t>(cost.experts ? options.expert_distance : options.distance);
        ASSERT_EQ(plan.uses[order[k]].on_demand, reach == 0);
        if (reach == 0) {
          ASSERT_FALSE(issued_at.contains(order[k]));
        } else {
          ASSERT_EQ(issued_at.at(order[k]), k < reach ? -1 : static_cast<int>(order[k - reach]));
        }
        const int from = reach == 0 ? static_cast<int>(order[k]) : issued_at.at(order[k]);
        for (int at = from; at <= static_cast<int>(order[k]); ++at)
          live[static_cast<size_t>(at + 1)] += cost.row[0].bytes;
      }
    for (size_t i = 0; i < uses.size(); ++i) ASSERT_EQ(plan.uses[i].live_bytes, live[i + 1]);
    ASSERT_EQ(plan.peak_bytes, *std::ranges::max_element(live));
  }
}

}  // namespace
}  // namespace tessera::etp
