#include "tessera/etp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::etp
