// A model whose parts are captured, and virtual ranks that use it, for the tests of captures.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/bootstrap.h"
#include "collective/group.h"
#include "device/record/check.h"
#include "device/record/sinks.h"
#include "device/stream.h"
#include "device/virtual/virtual_world.h"
#include "etp/etp_testing.h"

namespace tessera::etp {

inline constexpr int64_t kLong = 40;  // [F, K]
inline constexpr int64_t kWide = 8;
inline constexpr size_t kElements = kLong * kWide;
inline constexpr int64_t kBuffer = 64 * kWide * 4;  // with the padding of two ranks

inline RuntimeOptions graphed() {
  RuntimeOptions options = prefetching();
  options.graph_scope = {"attn"};
  return options;
}

// A runtime with graphed weights, and what is computed on its stream.
struct CapturedModel {
  CapturedModel(const ShardGroup& group, RuntimeOptions options, int weights, bool async)
      : compute(async ? group.impl()->device().make_stream({.name = "compute"}) : group.impl()->device().caller()),
        runtime(group, [&] {
          options.compute = compute;
          return options;
        }()) {
    for (int i = 0; i < weights; ++i)
      ids.push_back(
          runtime.add({.name = fmt::format("layers.{}.self_attention.qkv", i), .rows = kLong, .columns = kWide}));
    other = runtime.add({.name = "head", .rows = kLong, .columns = kWide});
    for (const WeightId w : ids) fill_shard(runtime, w, 1);
    runtime.start();
  }

  // Counts the elements that are not those of `version` when it runs.
  void use(WeightId weight, Phase phase, int micro_batch = 0) {
    const FullWeight full = runtime.acquire(weight, phase, {.micro_batch = micro_batch});
    const auto* data = static_cast<const float*>(full.data());
    compute->enqueue({.name = "use",
                      .subject = "model",
                      .accesses = {device::read_of(data, kElements * sizeof(float))},
                      .body = [this, data, weight] {
                        ++uses;
                        for (size_t i = 0; i < kElements; ++i)
                          wrong += data[i] == weight_value(weight, static_cast<int64_t>(i) / kWide,
                                                           static_cast<int64_t>(i) % kWide, version)
                                       ? 0
                                       : 1;
                      }});
  }
  // A gradient whose elements are the number of gradients so far, when it runs.
  void produce(WeightId weight, int micro_batch = 0) {
    GradientBuffer gradient = runtime.gradient_buffer(weight, micro_batch);
    auto* const data = static_cast<float*>(gradient.data());
    compute->enqueue({.name = "wgrad",
                      .subject = "model",
                      .accesses = {device::write_of(data, kElements * sizeof(float))},
                      .body = [this, data] { std::fill_n(data, kElements, static_cast<float>(++gradients)); }});
    runtime.produce(std::move(gradient));
  }
  void forward() {
    for (const WeightId w : ids) use(w, Phase::kForward);
  }
  void backward() {
    for (size_t i = ids.size(); i-- > 0;) {
      use(ids[i], Phase::kBackward);
      produce(ids[i]);
    }
  }
  void update(int64_t next) {
    runtime.update(ids, [&] {
      version = next;
      for (const WeightId w : ids) fill_shard(runtime, w, next);
    });
  }
  void synchronize() { compute->synchronize(Deadline::after(seconds(60))); }
  std::vector<float> gradient(size_t i) {
    const auto* rows = static_cast<const float*>(runtime.gradient(ids[i]));
    return {rows, rows + runtime.rows(ids[i]).size() * kWide};
  }

  std::shared_ptr<device::Stream> compute;
  Runtime runtime;
  std::vector<WeightId> ids{};
  WeightId other = 0;
  int64_t version = 1;
  int64_t wrong = 0;
  int uses = 0;
  int gradients = 0;
};

// Runs the ranks as fibers, records their schedules and expects that nothing is left unordered in them.
inline void run_checked(int ranks, uint64_t schedule, const std::function<void(const ShardGroup& group)>& body) {
  const device::Order orders[] = {device::Order::kLatestFirst, device::Order::kEarliestFirst};
  device::VirtualWorld world(schedule, schedule < 2 ? orders[schedule] : device::Order::kRandom);
  std::vector<device::RankLog> logs;
  for (int rank = 0; rank < ranks; ++rank) logs.emplace_back(device::LogHead{.run = 1, .rank = rank, .ranks = ranks});
  for (int rank = 0; rank < ranks; ++rank)
    world.device(rank).recorder().start(device::sink_to(logs[static_cast<size_t>(rank)]));
  collective::InProcessExchange exchange(ranks);
  world.run(ranks, [&](int rank) {
    device::Device& device = world.device(rank);
    ShardGroup group(
        collective::Group::form(exchange.of_rank(rank, device, seconds(60)),
                                {.rank = rank, .size = ranks, .device = &device, .slots = 16, .in_process = true}));
    body(group);
    group.close();
  });
  for (int rank = 0; rank < ranks; ++rank) world.device(rank).recorder().stop();
  const device::CheckReport report = device::check_schedule(logs);
  EXPECT_TRUE(report.ok()) << (report.conflicts.empty() ? std::string() : report.conflicts.front().to_string())
                           << testing::PrintToString(report.faults) << testing::PrintToString(report.unfinished);
  EXPECT_GT(report.accesses, 0u);
}

}  // namespace tessera::etp
