// The planner's speed and memory at the sizes that it is meant for: bin/plan_bench [--benchmark_filter=...]
//
// Counters: routes of the plan (or of all forty plans), its imbalance (largest egress over the lower bound), and for
// batches the bytes that the planner's caches hold.
#include <benchmark/benchmark.h>

#include "plan/realistic_layouts.h"

namespace tessera::plan {
namespace {

double imbalance(const PlanStats& stats) {
  if (stats.max_egress_lower_bound == 0) return 1;
  return static_cast<double>(stats.max_egress) / static_cast<double>(stats.max_egress_lower_bound);
}

void redistribute_one(benchmark::State& state, const Shape& shape, const char* src, const char* dst) {
  const TensorMeta meta{shape, DType::kBF16};
  const Layout from = Layout::parse(src);
  const Layout to = Layout::parse(dst);
  PlanStats stats;
  for (auto _ : state) {
    const Plan plan = redistribute(meta, from, to);
    stats = plan.stats;
  }
  state.counters["routes"] = static_cast<double>(stats.routes);
  state.counters["imbalance"] = imbalance(stats);
}

BENCHMARK_CAPTURE(redistribute_one, fsdp10240_to_tp8192, Shape({1 << 20, 128}), "fsdp=10240:S0", "tp=8192:S0")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(redistribute_one, fsdp1024_to_dp64_tp16, Shape({8192, 8192}), "fsdp=1024:S0", "dp=64,tp=16:R,S1")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(redistribute_one, rows1024_to_columns1024, Shape({8192, 8192}), "1024:S0", "1024@1024-2047:S1")
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(redistribute_one, partial1024_to_replicas1024, Shape({8192, 8192}), "1024:Psum", "1024:R")
    ->Unit(benchmark::kMillisecond);

BatchPlanner ten_thousand_tensors(const std::vector<Relayout>& relayouts) {
  BatchPlanner batch;
  for (size_t i = 0; i < 10'000; ++i) {
    const Relayout& r = relayouts[i % relayouts.size()];
    batch.add(r.meta, r.src, r.dst);
  }
  return batch;
}

// Ten thousand tensors of forty kinds: every kind's plan for all ranks, and the figures of the batch.
void plan_batch(benchmark::State& state) {
  const auto relayouts = realistic_relayouts();
  PlanStats stats;
  size_t memory = 0;
  for (auto _ : state) {
    const BatchPlanner batch = ten_thousand_tensors(relayouts);
    for (uint32_t i = 0; i < batch.kinds(); ++i) benchmark::DoNotOptimize(batch.plan(i));
    stats = batch.stats();
    memory = batch.memory_bytes();
  }
  state.counters["routes"] = static_cast<double>(stats.routes);
  state.counters["cache_bytes"] = static_cast<double>(memory);
}
BENCHMARK(plan_batch)->Unit(benchmark::kMillisecond);

// The work of one rank at registration: its own part of all ten thousand.
void plan_batch_for_one_rank(benchmark::State& state) {
  const auto relayouts = realistic_relayouts();
  int64_t routes = 0;
  for (auto _ : state) {
    const BatchPlanner batch = ten_thousand_tensors(relayouts);
    routes = 0;
    for (uint32_t i = 0; i < batch.size(); ++i)
      routes += batch.plan_for(i, static_cast<Rank>(state.range(0))).stats.routes;
  }
  state.counters["routes"] = static_cast<double>(routes);
}
BENCHMARK(plan_batch_for_one_rank)->Arg(7)->Arg(1030)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera::plan

BENCHMARK_MAIN();
