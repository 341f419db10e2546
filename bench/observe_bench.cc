// The cost of observability: metrics, traces and log lines, switched on and off.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <string>

#include "base/log.h"
#include "base/metrics.h"
#include "base/trace.h"

namespace tessera {
namespace {

void counter_add(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) Metrics::process().commands.add();
}
BENCHMARK(counter_add)->ThreadRange(1, 2);

void histogram_observe(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) Metrics::process().registration_seconds.observe(seconds(0.01));
}
BENCHMARK(histogram_observe);

void exposition(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) benchmark::DoNotOptimize(Metrics::process().exposition());
}
BENCHMARK(exposition);

void span_off(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) const TraceSpan span("span", {.subject = "weights/policy", .version = 1});
}
BENCHMARK(span_off);

void span_on(benchmark::State& state) {
  const std::string path = "/tmp/tessera-observe." + std::to_string(::getpid()) + ".json";
  {
    const auto trace = Trace::start(path);
    for ([[maybe_unused]] const auto _ : state)
      const TraceSpan span("span", {.subject = "weights/policy", .version = 1});
  }
  ::unlink(path.c_str());
}
BENCHMARK(span_on)->Iterations(200'000);  // fewer than may wait to be written: none is dropped

void log_below_its_level(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) log_event(LogLevel::trace, "bench", {{"rank", 1}}, "{}", 1);
}
BENCHMARK(log_below_its_level);

void log_scope(benchmark::State& state) {
  for ([[maybe_unused]] const auto _ : state) {
    const LogScope scope({{"job", "trainer"}, {"rank", 1}, {"batch", "policy"}});
    benchmark::ClobberMemory();
  }
}
BENCHMARK(log_scope);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
