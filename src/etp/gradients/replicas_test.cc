// Data parallelism: a group that has the weights several times.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/testing.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr int kShards = 2;
constexpr int kReplicas = 2;
// Whose sum depends on the order: by replicas first, it is 0.
constexpr std::array<float, 4> kTerms = {1e8F, 1, -1e8F, 1};

RuntimeOptions replicated(GradientScale scale = GradientScale::kSum) {
  RuntimeOptions options = prefetching();
  options.replicas = kReplicas;
  options.scale = scale;
  return options;
}

void produce(Runtime& runtime, WeightId weight, float value) {
  GradientBuffer gradient = runtime.gradient_buffer(weight);
  std::fill_n(static_cast<float*>(gradient.data()), gradient.rows() * gradient.columns(), value);
  runtime.produce(std::move(gradient));
}

TEST(ReplicasTest, EachKeepsAllRowsAndReadsItsOwn) {
  run_ranks(kShards * kReplicas, [](ShardGroup group) {
    Runtime runtime(group, replicated());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 3});
    const int shard = group.rank() % kShards;
    const int replica = group.rank() / kShards;
    EXPECT_EQ(runtime.rows(w), shard == 0 ? (RowRange{0, 32}) : (RowRange{32, 40}));
    fill_shard(runtime, w, replica);  // no replica would differ in a training
    runtime.start();
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, replica), 0);
    runtime.update({{w}}, [&] { fill_shard(runtime, w, 10 + replica); });
    EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward), w, 10 + replica), 0);
  });
}

TEST(ReplicasTest, GradientsAreFoldedInTheOrderOfAllRanks) {
  run_ranks(kShards * kReplicas, [](ShardGroup group) {
    Runtime runtime(group, replicated());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 3});
    const uint32_t norm = runtime.add_replicated("norm", 5, DType::kF32);
    runtime.start();
    const float term = kTerms[static_cast<size_t>(group.rank())];
    for (int step = 0; step < 3; ++step) {
      std::vector<float> own(5, term);
      runtime.give_replicated(norm, own.data(), own.data(), DType::kF32);
      produce(runtime, w, term);
      EXPECT_THAT(runtime.drain(), testing::ElementsAre(Added{.weight = w, .round = 0, .ranks = 4}));
      const auto* rows = static_cast<const float*>(runtime.gradient(w));
      const auto count = static_cast<size_t>(runtime.rows(w).size() * 3);
      EXPECT_THAT(std::vector<float>(rows, rows + count), Each(1.0F));
      EXPECT_THAT(own, Each(1.0F));
      runtime.zero_gradients();
    }
  });
}

TEST(ReplicasTest, TheMeanIsThatOfAllRanks) {
  run_ranks(kShards * kReplicas, [](ShardGroup group) {
    Runtime runtime(group, replicated(GradientScale::kMean));
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 3});
    runtime.start();
    produce(runtime, w, static_cast<float>(group.rank()));
    runtime.drain();
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 1.5F);
  });
}

TEST(ReplicasTest, AReplicaOfOneRankUsesItsShardItself) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, replicated());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 3});
    fill_shard(runtime, w, 1);
    runtime.start();
    EXPECT_EQ(runtime.acquire(w, Phase::kForward).data(), runtime.shard(w));
    produce(runtime, w, static_cast<float>(1 + group.rank()));
    runtime.drain();
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 3.0F);
  });
}

TEST(ReplicasTest, MoreRoundsThanThePageShowsWaitForTheOwnersOfAllReplicas) {
  constexpr int kRounds = 11;
  run_ranks(kShards * kReplicas, [](ShardGroup group) {
    Runtime runtime(group, replicated());
    const WeightId w = runtime.add({.name = "w", .rows = 40, .columns = 3});
    runtime.start();
    const int rounds = group.rank() == 3 ? 2 : kRounds;
    for (int j = 0; j < rounds; ++j) produce(runtime, w, 1);
    runtime.drain();
    EXPECT_EQ(*static_cast<float*>(runtime.gradient(w)), 3.0F * kRounds + 2);
  });
}

TEST(ReplicasTest, NumbersThatDoNotFitAreErrors) {
  run_ranks(3, [](ShardGroup group) {
    EXPECT_THAT(error_of([&] { const Runtime runtime(group, replicated()); }),
                HasSubstr("a group of 3 ranks cannot be 2 replicas of one size"));
  });
  run_ranks(4, [](ShardGroup group) {
    RuntimeOptions options = prefetching();
    options.replicas = group.rank() == 0 ? 4 : 2;
    Runtime runtime(group, options);
    EXPECT_THAT(error_of([&] { runtime.start(); }), HasSubstr("replica(s)"));
  });
}

}  // namespace
}  // namespace tessera::etp
