#include "etp/schedule/forecast.h"

#include <gtest/gtest.h>

namespace tessera::etp {
namespace {

TEST(Forecast, AddsUpWhatARankHolds) {
  const std::vector<ForecastWeight> weights{
      // Rank 1 of 2 has 15 of 31 rows; bf16 shards travel as they are.
      {.sharding = shard_rows(31, 2, 16),
       .columns = 64,
       .parameter = DType::kBF16,
       .format = WeightFormat(DType::kBF16),
       .wgrad = DType::kBF16},
      // fp32 shards, nvfp4 on the wire: 16 rows of 64 codes in 32 B, 4 scales, and an amax, at multiples of 64.
      {.sharding = shard_rows(32, 2, 16),
       .columns = 64,
       .parameter = DType::kF32,
       .format = WeightFormat(Format::kNvfp4),
       .wgrad = DType::kBF16},
      // Frozen, and rank 1 has none of it.
      {.sharding = shard_rows(5, 2, 16),
       .columns = 1000,
       .parameter = DType::kF32,
       .format = WeightFormat(DType::kBF16),
       .trained = false},
  };
  ForecastInput input{.weights = weights, .rank = 1, .replicated_bytes = 400, .gathered_bytes = 12345};
  const RuntimeForecast bytes = forecast_rank(input);
  EXPECT_EQ(bytes.parameters, 15 * 64 * 2 + 16 * 64 * 4);
  EXPECT_EQ(bytes.gradients, (15 + 16) * 64 * 4);
  EXPECT_EQ(bytes.publication, 16 * 32 + 64 + 64);
  EXPECT_EQ(bytes.replicated, 400);
  EXPECT_EQ(bytes.gathered, 12345);
  EXPECT_EQ(bytes.produced, (31 + 32) * 64 * 2);
  EXPECT_EQ(bytes.total(), bytes.parameters + bytes.gradients + bytes.publication + 400 + 12345 + bytes.produced);
  input.rank = 0;
  EXPECT_EQ(forecast_rank(input).parameters, 16 * 64 * 2 + 16 * 64 * 4 + 5 * 1000 * 4);
}

TEST(Forecast, CountsGradientsInFlightBySize) {
  const auto produced = [](int alike, int experts) {
    std::vector<ForecastWeight> weights;
    for (int i = 0; i < alike + experts; ++i)
      weights.push_back(
          {.sharding = shard_rows(32, 2, 16), .columns = 8, .wgrad = DType::kBF16, .experts = i < alike ? 0U : 1U});
    return forecast_rank({.weights = weights}).produced / (32 * 8 * 2);
  };
  EXPECT_EQ(produced(2, 0), 2);
  EXPECT_EQ(produced(7, 0), 3);
  EXPECT_EQ(produced(0, 8), 8);
  EXPECT_EQ(produced(7, 2), 3);
}

TEST(Forecast, LeavesOutWhatIsNotTheRuntimesMemory) {
  const std::vector<ForecastWeight> weights{{.sharding = shard_rows(32, 2, 16),
                                             .columns = 64,
                                             .format = WeightFormat(Format::kNvfp4),
                                             .accumulated = DType::kBF16,
                                             .native = true},
                                            {.sharding = shard_rows(32, 2, 16), .columns = 64, .lent_gradient = true}};
  const RuntimeForecast bytes = forecast_rank({.weights = weights});
  EXPECT_EQ(bytes.parameters, 16 * 64 * 2);
  EXPECT_EQ(bytes.masters, 16 * 64 * 2);
  EXPECT_EQ(bytes.gradients, 16 * 64 * 2);
  EXPECT_EQ(bytes.total(), bytes.parameters + bytes.publication + bytes.gradients + bytes.produced);
}

}  // namespace
}  // namespace tessera::etp
