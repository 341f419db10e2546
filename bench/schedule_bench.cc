// What the ETP schedule costs a use of a weight: bin/schedule_bench [--benchmark_filter=...]
//
// One iteration is a step of `layers` weights, forward and backward; items are uses.
#include <benchmark/benchmark.h>

#include "etp/schedule/cache.h"
#include "etp/schedule/predictor.h"

namespace tessera::etp {
namespace {

std::vector<Consumption> step_of(uint32_t layers) {
  std::vector<Consumption> uses;
  for (uint32_t i = 0; i < layers; ++i) uses.push_back({.weight = i});
  for (uint32_t i = layers; i-- > 0;) uses.push_back({.weight = i, .phase = Phase::kBackward});
  return uses;
}

// `wrong`: every such use is another weight than predicted, alternately.
void observe(benchmark::State& state, int distance, uint32_t wrong) {
  const auto layers = static_cast<uint32_t>(state.range(0));
  Predictor predictor({.distance = distance}, std::vector<GatherCost>(layers + 1, {.row = {{0, 4096}}}));
  const std::vector<Consumption> usual = step_of(layers);
  std::vector<Consumption> unusual = usual;
  if (wrong > 0)
    for (size_t i = 0; i < unusual.size(); i += wrong) unusual[i].weight = layers;
  bool odd = false;
  for (auto _ : state) {
    benchmark::DoNotOptimize(predictor.start().data());
    for (const Consumption& use : odd ? unusual : usual) benchmark::DoNotOptimize(predictor.observe(use).issue.data());
    predictor.update();
    odd = !odd;
  }
  state.SetItemsProcessed(state.iterations() * 2 * layers);
}

BENCHMARK_CAPTURE(observe, as_predicted, 1, 0)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(observe, as_predicted_8_ahead, 8, 0)->Arg(100)->Arg(1000);
BENCHMARK_CAPTURE(observe, every_tenth_wrong, 1, 10)->Arg(100)->Arg(1000);

void get_and_release(benchmark::State& state) {
  BufferCache cache(
      {.allocate = [](int64_t bytes) { return new (std::align_val_t(64)) std::byte[static_cast<size_t>(bytes)]; },
       .free = [](std::byte* memory, int64_t, const LastReader&) { operator delete[](memory, std::align_val_t(64)); }});
  std::vector<BufferTicket> tickets;
  for (int i = 0; i < 1000; ++i) tickets.push_back(cache.reserve({.rows = 16 * (1 + i % 4), .columns = 64}, "w"));
  for (auto _ : state) {
    for (const BufferTicket ticket : tickets) {
      benchmark::DoNotOptimize(cache.get(ticket).memory);
      cache.release(ticket, {});
    }
  }
  state.SetItemsProcessed(state.iterations() * std::ssize(tickets));
}
BENCHMARK(get_and_release);

}  // namespace
}  // namespace tessera::etp

BENCHMARK_MAIN();
