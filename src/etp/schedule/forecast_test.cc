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
  ForecastInput input{.weights = weights,
                      .rank = 1,
                      .rounds_in_flight = 7,
                      .replicated = {.bytes = 100, .copies = 4},
                      .gathered_bytes = 12345};
  const RankBytes bytes = forecast_rank(input);
  EXPECT_EQ(bytes.parameters, 15 * 64 * 2 + 16 * 64 * 4);
  EXPECT_EQ(bytes.gradients, (15 + 16) * 64 * 4);
  EXPECT_EQ(bytes.publication, 16 * 32 + 64 + 64);
  EXPECT_EQ(bytes.replicated, 400);
  EXPECT_EQ(bytes.gathered, 12345);
  EXPECT_EQ(bytes.gradients_in_flight, 3 * 32 * 64 * 2);
  EXPECT_EQ(bytes.total(), bytes.parameters + bytes.gradients + bytes.publication + 400 + 12345 + 3 * 32 * 64 * 2);
  input.rounds_in_flight = 1;
  EXPECT_EQ(forecast_rank(input).gradients_in_flight, 32 * 64 * 2);
  input.rank = 0;
  EXPECT_EQ(forecast_rank(input).parameters, 16 * 64 * 2 + 16 * 64 * 4 + 5 * 1000 * 4);
}

TEST(Forecast, SaysEachTerm) {
  EXPECT_EQ(to_string(RankBytes{1, 2, 3, 4, 5, 6}),
            "parameters 1 + gradients 2 + publication 3 + replicated 4 + gathered 5 + gradients in flight 6 = 21 B");
}

}  // namespace
}  // namespace tessera::etp
