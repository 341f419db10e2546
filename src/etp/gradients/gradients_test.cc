// Gradients of a step: rounds, several uses, where they are added, ranks that abandon a backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/testing.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(GradientsTest, MoreRoundsThanThePageShowsWaitAndAreFoldedAtTheDrain) {
  constexpr int kRounds = 11;
  run_ranks(3, [](ShardGroup group) {
    Runtime runtime(group, {.scale = GradientScale::kSum, .prefetch = PrefetchMode::kOff});
    const WeightId w = runtime.add({.name = "w", .rows = 90, .columns = 4});
    runtime.start();
    const int rounds = group.rank() == 2 ? 3 : kRounds;  // ranks may differ
    for (int j = 0; j < rounds; ++j) produce_ones(runtime, w);
    runtime.drain();
    ASSERT_FALSE(runtime.rows(w).empty());
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 2.0F * kRounds + 3);
    EXPECT_EQ(runtime.report().left_out, kRounds - 3);
  });
}

TEST(GradientsTest, WhatSeveralUsesGiveIsOneRound) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "tied", .rows = 32, .columns = 4});
    runtime.start();
    for (int use = 0; use < 3; ++use) runtime.acquire(w, Phase::kForward);
    produce_ones(runtime, w, 1);
    produce_ones(runtime, w, 2);
    EXPECT_TRUE(runtime.added().empty());
    if (group.rank() == 0) produce_ones(runtime, w, 4);  // the other rank's backward ends early
    const std::vector<Added> added = runtime.drain();
    EXPECT_THAT(added, testing::ElementsAre(Added{.weight = w, .round = 0, .ranks = 2}));
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), (7.0F + 3.0F) / 2);
  });
}

TEST(GradientsTest, WhatARepeatedBackwardGivesIsOneRound) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "tied", .rows = 32, .columns = 4});
    runtime.start();
    for (int use = 0; use < 2; ++use) {
      GradientBuffer gradient = runtime.gradient_buffer(w);
      std::fill_n(static_cast<float*>(gradient.data()), 32 * 4, 1.0F);
      runtime.produce(std::move(gradient), false);
    }
    EXPECT_TRUE(runtime.added().empty());
    EXPECT_THAT(runtime.drain(), testing::ElementsAre(Added{.weight = w, .round = 0, .ranks = 2}));
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 2.0F);
  });
}

TEST(GradientsTest, GradientsGoWhereTheCallerSays) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 32, .columns = 4});
    runtime.start();
    std::vector<float> mine(static_cast<size_t>(runtime.rows(w).size() * 4), NAN);
    runtime.set_gradient(w, mine.data(), DType::kF32, true);
    produce_ones(runtime, w, 3);
    EXPECT_THAT(error_of([&] { runtime.set_gradient(w, nullptr, DType::kF32); }),
                HasSubstr("has a gradient in flight"));
    runtime.drain();
    EXPECT_THAT(mine, testing::Each(3.0F));
    produce_ones(runtime, w, 1);
    runtime.drain();
    EXPECT_THAT(mine, testing::Each(4.0F));
    EXPECT_EQ(runtime.report().gradient_bytes, 0);
  });
}

TEST(GradientsTest, AnAbandonedBackwardIsToldToAllRanks) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const WeightId w = runtime.add({.name = "w", .rows = 32, .columns = 4});
    runtime.start();
    produce_ones(runtime, w, 1);
    if (group.rank() == 1)
      runtime.abandon();
    else
      EXPECT_THAT(error_of([&] { runtime.drain(); }), StartsWith("cancelled: rank 1 (pid"));
    runtime.zero_gradients();
    produce_ones(runtime, w, 5);
    runtime.drain();
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 5.0F);
  });
}

TEST(GradientsTest, ReplicatedGradientsAreFoldedInRankOrderAndWhatNobodyGaveIsLeft) {
  run_ranks(3, [](ShardGroup group) {
    Runtime runtime(group, {.scale = GradientScale::kSum, .prefetch = PrefetchMode::kOff});
    const uint32_t norm = runtime.add_replicated("norm", 5, DType::kF32);
    const uint32_t bias = runtime.add_replicated("bias", 3, DType::kBF16);
    const uint32_t unused = runtime.add_replicated("unused", 2, DType::kF32);
    runtime.start();
    const float values[] = {1e8F, 1, -1e8F};
    std::vector<float> gradient(5, values[group.rank()]);
    std::vector<float> accumulated(5, 2);
    std::vector<uint16_t> half(3, 0x3f80);  // 1
    std::vector<float> untouched(2, 9);
    runtime.give_replicated(norm, gradient.data(), accumulated.data(), DType::kF32);
    runtime.give_replicated(bias, group.rank() == 1 ? nullptr : half.data(), group.rank() == 1 ? nullptr : half.data(),
                            DType::kBF16);
    runtime.give_replicated(unused, nullptr, untouched.data(), DType::kF32);
    EXPECT_THAT(runtime.replicated_ranks(), testing::Each(0));
    runtime.drain();
    EXPECT_THAT(runtime.replicated_ranks(), testing::ElementsAre(3, 2, 0));
    runtime.drain();
    EXPECT_THAT(runtime.replicated_ranks(), testing::Each(0));
    EXPECT_THAT(accumulated, testing::Each(((2 + 1e8F) + 1) - 1e8F));
    EXPECT_THAT(half, testing::Each(group.rank() == 1 ? 0x3f80 : 0x4000));
    EXPECT_THAT(untouched, testing::Each(9.0F));
  });
}

}  // namespace
}  // namespace tessera::etp
