// How much memory gradients take that are not folded yet.
#include <gtest/gtest.h>

#include <fmt/format.h>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "collective/group.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

// Each rank runs ahead of the other as far as it can.
TEST(RoomTest, TheFirstStepKeepsToTheForecast) {
  run_ranks(2, [](ShardGroup group) {
    Runtime runtime(group, prefetching());
    std::vector<WeightId> layers, experts;
    for (int i = 0; i < 12; ++i)
      layers.push_back(runtime.add({.name = fmt::format("layers.{}", i), .rows = 64, .columns = 256}));
    for (int i = 0; i < 5; ++i)
      experts.push_back(runtime.add({.name = fmt::format("experts.{}", i), .rows = 64, .columns = 8}));
    runtime.add_experts(experts);
    runtime.start();
    const RuntimeForecast forecast = runtime.forecast();
    for (int step = 0; step < 3; ++step) {
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        std::vector<GradientBuffer> gradients;
        for (const WeightId expert : experts) gradients.push_back(runtime.gradient_buffer(expert, micro_batch));
        for (const GradientBuffer& gradient : gradients) std::memset(gradient.data(), 0, 64 * 8 * 4);
        runtime.produce(gradients);
        for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
          GradientBuffer gradient = runtime.gradient_buffer(*layer, micro_batch);
          std::memset(gradient.data(), 0, 64 * 256 * 4);
          runtime.produce(std::move(gradient));
        }
      }
      const RuntimeReport report = runtime.report();
      EXPECT_LE(report.produced_peak_bytes, forecast.produced) << "step " << step;
      EXPECT_EQ(report.pool_grown, 2) << "step " << step;  // five experts at once
      runtime.update(layers, [] {});
    }
  });
}

// Rank 0 begins its backward once rank 1 has done all of its own, or waits. Between a backward and its update lies an
// interval without gradients, as in every step of a training.
TEST(RoomTest, LaterStepsKeepToTheForecast) {
  constexpr int kLayers = 12;
  std::atomic<int> produced{0};
  std::atomic<bool> waits{false};
  run_ranks(2, [&](ShardGroup group) {
    RuntimeOptions options = prefetching();
    if (group.rank() == 1) options.while_waiting = [&] { waits = true; };
    Runtime runtime(group, options);
    std::vector<WeightId> layers;
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(runtime.add({.name = fmt::format("layers.{}", i), .rows = 64, .columns = 256}));
    runtime.start();
    const int64_t forecast = runtime.forecast().produced;
    for (int step = 0; step < 3; ++step) {
      runtime.update(layers, [] {});  // also without a gradient before it
      if (group.rank() == 1) waits = false;
      group.impl()->barrier("step");
      while (group.rank() == 0 && !waits && produced < kLayers * (step + 1)) std::this_thread::yield();
      for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        produce_ones(runtime, *layer);
        if (group.rank() == 1) ++produced;
      }
      runtime.drain();
      EXPECT_LE(runtime.report().produced_peak_bytes, forecast) << "step " << step;
      EXPECT_EQ(runtime.report().pool_grown, 0) << "step " << step;
      runtime.update(layers, [] {});
    }
  });
}

}  // namespace
}  // namespace tessera::etp
