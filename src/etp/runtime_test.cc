#include "tessera/etp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/testing.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

void fill_gradient(const GradientBuffer& gradient, float value) {
  auto* to = static_cast<float*>(gradient.data());
  for (int64_t i = 0; i < gradient.rows() * gradient.columns(); ++i) *to++ = value + static_cast<float>(i % 7);
}

TEST(RuntimeTest, AWeightIsGatheredUsedReducedAndUpdated) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    const std::vector<WeightId> weights{runtime.add({.name = "a", .rows = 63, .columns = 8}),
                                        runtime.add({.name = "b", .rows = 17, .columns = 24})};
    for (const WeightId w : weights) fill_shard(runtime, w, 1);
    runtime.start();
    for (int64_t step = 1; step <= 3; ++step) {
      for (const WeightId w : weights) {
        const FullWeight full = runtime.acquire(w, Phase::kForward);
        EXPECT_EQ(full.version(), step);
        EXPECT_EQ(wrong_elements(full, w, step), 0);
      }
      for (const WeightId w : {weights[1], weights[0]}) {
        const FullWeight full = runtime.acquire(w, Phase::kBackward, {.version = step});
        EXPECT_EQ(wrong_elements(full, w, step), 0);
        GradientBuffer gradient = runtime.gradient_buffer(w);
        fill_gradient(gradient, static_cast<float>(group.rank() + 1));
        runtime.produce(std::move(gradient));
      }
      EXPECT_EQ(runtime.drain().size(), 2U);
      for (const WeightId w : weights) {
        const auto* gradient = static_cast<const float*>(runtime.gradient(w));
        const int64_t columns = runtime.spec(w).columns;
        const RowRange rows = runtime.rows(w);
        for (int64_t i = 0; i < rows.size() * columns; ++i) {
          const auto at = static_cast<float>((rows.begin * columns + i) % 7);
          ASSERT_EQ(gradient[i], (1 + at) * 0.5F + (2 + at) * 0.5F) << w << " " << i;
        }
      }
      runtime.zero_gradients();
      runtime.update(weights, [&] {
        for (const WeightId w : weights) fill_shard(runtime, w, step + 1);
      });
    }
    const RuntimeReport report = runtime.report();
    EXPECT_EQ(report.consumptions, 12);
    EXPECT_EQ(report.on_demand, 4);
    EXPECT_EQ(report.prefetched, 8);
    EXPECT_EQ(report.rounds, 6);
  });
}

// What has been gathered by the caller, and ahead, since the start.
std::array<int64_t, 2> gathered(const Runtime& runtime) {
  const RuntimeReport report = runtime.report();
  return {report.on_demand, report.prefetched};
}

TEST(RuntimeTest, TheFirstStepIsPrefetchedFromItsSecondMicroBatchOn) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    std::vector<WeightId> weights;
    for (const char* name : {"a", "b", "c"}) weights.push_back(runtime.add({.name = name, .rows = 64, .columns = 8}));
    for (const WeightId w : weights) fill_shard(runtime, w, 1);
    runtime.start();
    const auto pass = [&](int micro_batch, int64_t version) {
      for (const WeightId w : weights)
        EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kForward, {.micro_batch = micro_batch}), w, version), 0);
      for (const WeightId w : {weights[2], weights[1], weights[0]}) {
        const Use use{.micro_batch = micro_batch, .version = version};
        EXPECT_EQ(wrong_elements(runtime.acquire(w, Phase::kBackward, use), w, version), 0);
        produce_ones(runtime, w, 1, micro_batch);
      }
    };
    pass(0, 1);
    EXPECT_EQ(gathered(runtime), (std::array<int64_t, 2>{6, 0}));
    pass(1, 1);
    EXPECT_EQ(gathered(runtime), (std::array<int64_t, 2>{7, 5}));
    pass(2, 1);
    EXPECT_EQ(gathered(runtime), (std::array<int64_t, 2>{7, 11}));
    EXPECT_EQ(runtime.report().mispredicted, 0);
    runtime.update(weights, [&] {
      for (const WeightId w : weights) fill_shard(runtime, w, 2);
    });
    EXPECT_EQ(runtime.report().mispredicted, 1);  // of a fourth micro-batch, which is not read with the rows of another
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) pass(micro_batch, 2);
    EXPECT_EQ(gathered(runtime), (std::array<int64_t, 2>{7, 29}));
    EXPECT_EQ(runtime.report().mispredicted, 1);
    runtime.drain();  // a rank that ends earlier takes its gradients from those that still fold them
  });
}

TEST(RuntimeTest, MicroBatchesOfAFirstStepMayDifferFromEachOtherAndBetweenRanks) {
  const std::vector<std::vector<std::vector<size_t>>> programs{
      {{0, 1, 2, 3}, {0, 2, 3}, {0, 1, 1, 3, 2}, {}, {0, 1, 2, 3}},
      {{0, 1, 2, 3}, {3, 2, 1, 0}, {0}, {0, 1, 2, 3, 0, 1}, {2}},
      {{1}, {0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3, 2, 3}, {2, 3, 2, 3, 2, 3}}};
  for (const int distance : {1, 2, 5})
    run_ranks(3, [&](ShardGroup group) {
      RuntimeOptions options = prefetching();
      options.distance = distance;
      Runtime runtime(group, options);
      std::vector<WeightId> weights;
      for (const char* name : {"a", "b", "c", "d"})
        weights.push_back(runtime.add({.name = name, .rows = 40, .columns = 4}));
      for (const WeightId w : weights) fill_shard(runtime, w, 1);
      runtime.start();
      for (int64_t version = 1; version <= 3; ++version) {
        const auto& program = programs[static_cast<size_t>(group.rank() + version) % programs.size()];
        for (size_t position = 0; position < program.size(); ++position)
          for (const size_t i : program[position]) {
            const FullWeight full =
                runtime.acquire(weights[i], Phase::kForward, {.micro_batch = static_cast<int>(position)});
            EXPECT_EQ(wrong_elements(full, weights[i], version), 0);
          }
        runtime.update(weights, [&] {
          for (const WeightId w : weights) fill_shard(runtime, w, version + 1);
        });
      }
      const RuntimeReport report = runtime.report();
      EXPECT_EQ(report.consumptions, report.on_demand + report.prefetched);
      EXPECT_GT(report.prefetched, 0);
    });
}

}  // namespace
}  // namespace tessera::etp
