// The cost of streams: what it takes to enqueue, to wake a thread, to record, to replay.
#include <benchmark/benchmark.h>

#include <atomic>
#include <memory>

#include "device/capture.h"
#include "device/cpu_device.h"
#include "device/virtual/virtual_world.h"

namespace tessera::device {
namespace {

// A gather of one weight, as the scheduler of ETP declares it.
Operation gather(std::atomic<int>& ran) {
  static std::byte memory[256];
  return {.name = "gather",
          .subject = "h.0.attn.weight",
          .accesses = {read_of(memory, 64, 1), read_of(memory + 64, 64, 1), write_of(memory + 128, 128, 1)},
          .body = [&ran] { ran.fetch_add(1, std::memory_order_relaxed); },
          .bytes = 128};
}

Deadline far() {
  return Deadline::at(TimePoint::max());
}

// What the caller pays for the declaration itself.
void declare(benchmark::State& state) {
  std::atomic<int> ran{0};
  for ([[maybe_unused]] const auto _ : state) benchmark::DoNotOptimize(gather(ran));
}
BENCHMARK(declare);

void enqueue_inline(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.caller();
  std::atomic<int> ran{0};
  for ([[maybe_unused]] const auto _ : state) stream->enqueue(gather(ran));
}
BENCHMARK(enqueue_inline);

void enqueue_inline_shared(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.caller();
  std::atomic<int> ran{0};
  const auto operation = std::make_shared<const Operation>(gather(ran));
  for ([[maybe_unused]] const auto _ : state) stream->enqueue(operation);
}
BENCHMARK(enqueue_inline_shared);

// One consumption's records: an operation with three accesses, an event, a wait of the host's stream, a host access.
void consume(benchmark::State& state, bool recorded) {
  CpuDevice device;
  const auto stream = device.caller();
  std::atomic<int> ran{0};
  const auto operation = std::make_shared<const Operation>(gather(ran));
  Recorder& recorder = device.recorder();
  if (recorded) recorder.start([](std::unique_ptr<RecordBlock> block) { return block; });
  for ([[maybe_unused]] const auto _ : state) {
    recorder.event_wait(0, 1);
    stream->enqueue(operation);
    recorder.event_record(1, 1);
    recorder.host_access("gemm", "h.0.attn.weight", {operation->accesses.data(), 2});
  }
}
BENCHMARK_CAPTURE(consume, recorder_off, false);
BENCHMARK_CAPTURE(consume, recorder_on, true);

// To a stream whose thread is busy: no wake-up.
void enqueue_busy_thread(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "gather"});
  std::atomic<int> ran{0};
  int given = 0;
  for ([[maybe_unused]] const auto _ : state) {
    stream->enqueue(gather(ran));
    if (++given % 1024 == 0) {
      state.PauseTiming();
      stream->synchronize(far());
      state.ResumeTiming();
    }
  }
  stream->synchronize(far());
}
BENCHMARK(enqueue_busy_thread);

// To a thread that sleeps, until the host is awake again: two wake-ups.
void enqueue_and_wait(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "gather"});
  std::atomic<int> ran{0};
  for ([[maybe_unused]] const auto _ : state) {
    stream->enqueue(gather(ran));
    device.wait_host(stream->record(), far());
  }
}
BENCHMARK(enqueue_and_wait)->UseRealTime();

// What the host pays to wake a thread that sleeps.
void wake_thread(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.make_stream({.name = "gather"});
  std::atomic<int> ran{0};
  for ([[maybe_unused]] const auto _ : state) {
    const TimePoint begin = Clock::steady().now();
    stream->enqueue(gather(ran));
    state.SetIterationTime(to_seconds(Clock::steady().now() - begin));
    stream->synchronize(far());
  }
}
BENCHMARK(wake_thread)->UseManualTime();

void replay_inline(benchmark::State& state) {
  CpuDevice device;
  const auto stream = device.caller();
  std::atomic<int> ran{0};
  Capture capture;
  {
    const CaptureScope scope(capture, {stream});
    for (int i = 0; i < 100; ++i) stream->enqueue(gather(ran));
  }
  for ([[maybe_unused]] const auto _ : state) capture.replay();
  state.SetItemsProcessed(state.iterations() * 100);
}
BENCHMARK(replay_inline);

// Eight ranks with two streams each: a step of the simulation.
void virtual_step(benchmark::State& state) {
  std::atomic<int> ran{0};
  uint64_t steps = 0;
  for ([[maybe_unused]] const auto _ : state) {
    VirtualWorld world(1);
    world.run(8, [&](int rank) {
      Device& device = world.device(rank);
      const auto one = device.make_stream({.name = "one"});
      const auto two = device.make_stream({.name = "two"});
      for (int i = 0; i < 100; ++i) {
        one->enqueue(gather(ran));
        two->wait(one->record());
        two->enqueue(gather(ran));
        device.wait_host(two->record(), far());
      }
    });
    steps += world.steps();
  }
  state.SetItemsProcessed(static_cast<int64_t>(steps));
}
BENCHMARK(virtual_step);

}  // namespace
}  // namespace tessera::device

BENCHMARK_MAIN();
