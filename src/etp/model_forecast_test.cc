#include "etp/model_forecast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/testing.h"
#include "etp/etp_testing.h"
#include "etp/gradients/replicated.h"

namespace tessera::etp {
namespace {

using testing::HasSubstr;

ModelToShard everything() {
  ModelToShard model;
  model.weights = {
      {{.name = "embedding.weight", .rows = 203, .columns = 64}},
      {{.name = "up", .rows = 64, .columns = 64, .dtype = DType::kBF16, .accumulated = DType::kBF16}},
      {{.name = "experts", .rows = 32, .columns = 64, .format = "mxfp8"}, 3},
      {{.name = "e0", .rows = 48, .columns = 64}},
      {{.name = "e1", .rows = 48, .columns = 64}},
      {{.name = "attention.native", .rows = 64, .columns = 64, .format = "nvfp4", .native = true}},
      {{.name = "frozen", .rows = 64, .columns = 64, .format = "bf16", .frozen = true}},
      {{.name = "down", .rows = 64, .columns = 64}},
  };
  model.lists = {{3, 4}};
  model.replicated = {100, 1000};
  return model;
}

void tell(Runtime& runtime, const ModelToShard& model) {
  std::vector<WeightId> ids;
  for (const ModelToShard::Weight& weight : model.weights)
    ids.push_back(weight.count > 1 ? runtime.add_stack(weight.spec, weight.count).front() : runtime.add(weight.spec));
  for (const std::vector<size_t>& list : model.lists) {
    std::vector<WeightId> experts;
    for (const size_t place : list) experts.push_back(ids[place]);
    runtime.add_experts(experts);
  }
  for (const int64_t bytes : model.replicated) runtime.add_replicated("whole", bytes / 4, DType::kF32);
}

TEST(ModelForecast, IsWhatARuntimeForecasts) {
  const ModelToShard model = everything();
  for (const auto& [ranks, replicas] : {std::pair(2, 1), std::pair(4, 1), std::pair(4, 2), std::pair(3, 3)}) {
    for (const auto& change : std::vector<std::function<void(RuntimeOptions&)>>{
             [](RuntimeOptions&) {}, [](RuntimeOptions& options) { options.distance = 3; },
             [](RuntimeOptions& options) { options.prefetch = PrefetchMode::kOff; },
             [](RuntimeOptions& options) { options.cap_bytes = 40'000; },
             [](RuntimeOptions& options) { options.graph_scope = {"attn"}; }}) {
      RuntimeOptions options = prefetching();
      options.replicas = replicas;
      change(options);
      run_ranks(ranks, [&](ShardGroup group) {
        Runtime runtime(group, options);
        tell(runtime, model);
        const RuntimeForecast forecast = runtime.forecast();
        EXPECT_EQ(forecast_model(model, group.rank(), group.size(), options), forecast) << group.rank();
        EXPECT_GT(forecast.parameters, 0);
        EXPECT_GT(forecast.masters, 0);
        EXPECT_EQ(forecast.parameters, runtime.report().shard_bytes);
        EXPECT_EQ(forecast.replicated, 128 + 1024);
      });
    }
  }
}

TEST(ModelForecast, NeedsNoMemory) {
  ModelToShard model;
  for (int layer = 0; layer < 80; ++layer)
    model.weights.push_back({{.name = fmt::format("layers.{}", layer), .rows = 1 << 20, .columns = 1 << 16}});
  const RuntimeForecast forecast = forecast_model(model, 7, 8, prefetching());
  EXPECT_EQ(forecast.parameters, int64_t{80} << 35);  // 2.75 TB
  EXPECT_EQ(forecast.gathered, int64_t{2} << 38);
  EXPECT_EQ(forecast.produced, int64_t{3} << 38);
}

TEST(ModelForecast, RefusesWhatARuntimeRefuses) {
  ModelToShard model{.weights = {{{.name = "w", .rows = 4, .columns = 4, .format = "int4"}}}};
  EXPECT_THAT(error_of([&] { forecast_model(model, 0, 2, {}); }), HasSubstr("int4"));
  model.weights.front().spec.format = "";
  EXPECT_THAT(error_of([&] { forecast_model(model, 2, 2, {}); }), HasSubstr("there is no rank 2 of 2"));
  EXPECT_THAT(error_of([&] { forecast_model(model, 0, 4, {.replicas = 3}); }), HasSubstr("cannot be 3 replicas"));
}

TEST(ModelForecast, BucketsAreFilledInOrder) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  EXPECT_EQ(largest_bucket({}), 0);
  EXPECT_EQ(largest_bucket(std::vector<int64_t>{1, 65}), 64 + 128);
  EXPECT_EQ(largest_bucket(std::vector<int64_t>{10 * kMiB, 5 * kMiB, 4 * kMiB}), 15 * kMiB);
  EXPECT_EQ(largest_bucket(std::vector<int64_t>{20 * kMiB, kMiB}), 20 * kMiB);
}

}  // namespace
}  // namespace tessera::etp
