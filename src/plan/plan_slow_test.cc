// Larger random tensors, and the planner's speed in CPU time of this process.
#include <gtest/gtest.h>

#include <ctime>

#include "plan/realistic_layouts.h"
#include "plan/testing/property_check.h"

namespace tessera::plan {
namespace {

TEST(LargeRedistribution, IsJudgedElementByElement) {
  const RandomLayouts::Limits large{
      .max_dims = 5, .max_size = 400, .max_elements = 100'000, .max_axes = 3, .max_ranks = 40, .highest_rank = 47};
  RandomLayouts::Limits plain = large;
  plain.ops.clear();
  RandomLayouts with_partial(41, large);
  RandomLayouts without_partial(42, plain);
  for (int planned = 0; planned < 300;) {
    const Case c = random_case(with_partial, without_partial);
    if (check_case(c)) ++planned;
    if (HasFailure()) FAIL() << "case " << planned << ": " << c.text();
  }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kSlack = 30;
#else
constexpr double kSlack = 1;
#endif

template <typename Work>
double cpu_seconds(Work work) {
  const std::clock_t begin = std::clock();
  work();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

TEST(Scale, TenThousandShardsToEightThousandTakeAFifthOfASecond) {
  const TensorMeta meta{{1 << 20, 128}, DType::kBF16};
  EXPECT_LT(cpu_seconds([&] {
              const Plan plan = redistribute(meta, Layout::parse("fsdp=10240:S0"), Layout::parse("tp=8192:S0"));
              EXPECT_EQ(plan.stats.bytes_moved, plan.stats.bytes_lower_bound);
            }),
            0.2 * kSlack);
}

TEST(Scale, AThousandShardsToSixteenColumnsOnSixtyFourReplicasTakeASecond) {
  const TensorMeta meta{{8192, 8192}, DType::kBF16};
  EXPECT_LT(cpu_seconds([&] {
              const Plan plan = redistribute(meta, Layout::parse("fsdp=1024:S0"), Layout::parse("dp=64,tp=16:R,S1"));
              EXPECT_EQ(plan.stats.bytes_moved, plan.stats.bytes_lower_bound);
            }),
            1.0 * kSlack);
}

TEST(Scale, TenThousandTensorsOfFortyKindsTakeTwoSeconds) {
  const auto relayouts = realistic_relayouts();
  EXPECT_LT(cpu_seconds([&] {
              BatchPlanner batch;
              for (size_t i = 0; i < 10'000; ++i) {
                const Relayout& r = relayouts[i % relayouts.size()];
                batch.add(r.meta, r.src, r.dst);
              }
              for (uint32_t i = 0; i < batch.kinds(); ++i) EXPECT_FALSE(batch.plan(i).routes.empty());
              for (uint32_t i = 0; i < batch.size(); ++i) batch.plan_for(i, 7);
              EXPECT_EQ(batch.stats().bytes_moved, batch.stats().bytes_lower_bound);
              EXPECT_LT(batch.memory_bytes(), size_t{64} << 20);
            }),
            2.0 * kSlack);
}

}  // namespace
}  // namespace tessera::plan
