// What groups of ETP cost: waits, calls, gathers and folds of two or four ranks, which are threads here with all that
// processes have between them. Compare with the copies at the end.
#include <benchmark/benchmark.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "codec/simd/stream.h"
#include "collective/group.h"
#include "collective/movement/fold.h"
#include "collective/movement/gather.h"
#include "device/cpu_device.h"
#include "tessera/memory.h"

namespace tessera::collective {
namespace {

constexpr uint32_t kSlots = 2048;

// The groups of all ranks; each may be used by any thread.
class Ranks {
 public:
  explicit Ranks(int size) : groups_(static_cast<size_t>(size)) {
    InProcessExchange exchange(size);
    for (int rank = 0; rank < size; ++rank)
      devices_.push_back(std::make_unique<device::CpuDevice>(device::DeviceOptions{.rank = rank}));
    together([&](int rank) {
      device::Device& device = *devices_[static_cast<size_t>(rank)];
      groups_[static_cast<size_t>(rank)] =
          Group::form(exchange.of_rank(rank, device, std::chrono::seconds(60)),
                      {.rank = rank, .size = size, .device = &device, .slots = kSlots});
    });
  }
  ~Ranks() {
    together([&](int rank) { (*this)[rank].close(Deadline::after(std::chrono::seconds(60))); });
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  Group& operator[](int rank) { return *groups_[static_cast<size_t>(rank)]; }

 private:
  template <typename Body>
  void together(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(groups_.size()); ++rank)
      threads.push_back(start_thread("rank", [&body, rank] { body(rank); }));
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<device::Device>> devices_;
  std::vector<std::shared_ptr<Group>> groups_;
};

void max_exchange(benchmark::State& state) {
  Ranks ranks(2);
  std::vector<float> values(1000);
  std::thread peer = start_thread("peer", [&] {
    std::vector<float> theirs(1000);
    while (theirs[0] == 0) ranks[1].max_exchange(theirs);
  });
  for (auto _ : state) ranks[0].max_exchange(values);
  values[0] = 1;
  ranks[0].max_exchange(values);
  peer.join();
}
BENCHMARK(max_exchange)->UseRealTime()->Unit(benchmark::kMicrosecond);

// A word there and one back, each to a thread that sleeps.
void two_bells(benchmark::State& state) {
  Ranks ranks(2);
  constexpr uint64_t kEnd = uint64_t{1} << 40;
  std::thread peer = start_thread("peer", [&] {
    for (uint64_t value = 1; ranks[1].get(0, Word::kPublished, 0) < kEnd; ++value) {
      ranks[1].device().wait_host(*ranks[1].at_least(0, Word::kPublished, 0, value, ""), ranks[1].deadline());
      ranks[1].set(Word::kPublished, 0, value);
    }
  });
  uint64_t value = 0;
  for (auto _ : state) {
    ranks[0].set(Word::kPublished, 0, ++value);
    ranks[0].device().wait_host(*ranks[0].at_least(1, Word::kPublished, 0, value, ""), ranks[0].deadline());
  }
  ranks[0].set(Word::kPublished, 0, kEnd);
  peer.join();
}
BENCHMARK(two_bells)->UseRealTime()->Unit(benchmark::kMicrosecond);

// Weights of bf16, cut in two; `shard` bytes each.
class Published {
 public:
  Published(Ranks& ranks, size_t weights, size_t shard) : to_(weights * 2 * shard) {
    const auto columns = static_cast<int64_t>(std::min<size_t>(shard / 2, 1024));
    const auto rows = static_cast<int64_t>(shard / 2) / std::max<int64_t>(columns, 1);
    for (size_t i = 0; i < weights; ++i) {
      auto weight = std::make_shared<PublishedWeight>();
      weight->rows = 2 * rows;
      weight->columns = columns;
      weight->dtype = DType::kBF16;
      for (int rank = 0; rank < 2; ++rank) {
        memory_.push_back(SharedHeap::process().allocate(shard));
        const MemoryRef place = ranks[rank].refer(memory_.back().data(), shard);
        weight->owners.push_back({.begin = rank * rows, .count = rows, .data = ranks[0].map(rank, place)});
        ranks[rank].set(Word::kPublished, static_cast<uint32_t>(i), 1);
      }
      parts_.push_back({.slot = static_cast<uint32_t>(i),
                        .version = 1,
                        .from = weight,
                        .to = {.data = to_.data() + i * 2 * shard,
                               .dtype = DType::kBF16,
                               .rows = 2 * rows,
                               .columns = columns,
                               .row_stride = columns},
                        .weight = "w"});
    }
  }
  std::span<const GatherPart> parts() const { return parts_; }
  int64_t bytes() const { return static_cast<int64_t>(to_.size()); }

 private:
  std::vector<SharedBuffer> memory_;
  std::vector<std::byte> to_;
  std::vector<GatherPart> parts_;
};

void gathers(benchmark::State& state) {
  Ranks ranks(2);
  const Published published(ranks, static_cast<size_t>(state.range(0)), static_cast<size_t>(state.range(1)));
  const auto stream = ranks[0].device().caller();
  for (auto _ : state) gather(ranks[0], *stream, published.parts());
  stream->synchronize(ranks[0].deadline());
  state.SetBytesProcessed(state.iterations() * published.bytes());
}
BENCHMARK(gathers)->ArgNames({"weights", "shard"})->Args({1, 64})->Args({1, 32 << 20})->Args({1000, 4096});

// Of rank 0's rows, 16 MiB of fp32; counts what is read and written.
void folds(benchmark::State& state) {
  const int size = static_cast<int>(state.range(0));
  Ranks ranks(size);
  constexpr int64_t kColumns = 1024;
  constexpr int64_t kRows = 4096;
  constexpr size_t kBytes = kRows * kColumns * sizeof(float);
  std::vector<SharedBuffer> memory;
  for (int rank = 0; rank < size; ++rank) {
    memory.push_back(SharedHeap::process().allocate(kBytes));
    ranks[rank].set_gradient(0, 1, 0, {.memory = ranks[rank].refer(memory.back().data(), kBytes)});
    ranks[rank].set(Word::kProduced, 0, round_word(1, 1));
  }
  std::vector<float> accumulated(kRows * kColumns);
  const FoldPart part{.slot = 0,
                      .interval = 1,
                      .round = 0,
                      .rows = kRows,
                      .total_rows = kRows,
                      .columns = kColumns,
                      .accumulated = accumulated.data(),
                      .scale = 0.5F,
                      .weight = "w"};
  const auto stream = ranks[0].device().caller();
  for (auto _ : state) fold(ranks[0], *stream, {&part, 1});
  stream->synchronize(ranks[0].deadline());
  state.SetBytesProcessed(state.iterations() * (size + 2) * static_cast<int64_t>(kBytes));
}
BENCHMARK(folds)->ArgName("ranks")->Arg(2)->Arg(4);

// The ceilings.
void copies(benchmark::State& state, bool past_caches, int64_t counted) {
  const auto bytes = static_cast<size_t>(state.range(0));
  const SharedBuffer from = SharedHeap::process().allocate(bytes);
  std::vector<std::byte> to(bytes);
  for (auto _ : state) {
    if (past_caches) {
      copy_stream(to.data(), from.data(), bytes);
      stream_fence();
    } else {
      std::memcpy(to.data(), from.data(), bytes);
    }
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * counted);
}
BENCHMARK_CAPTURE(copies, stream, true, 1)->Arg(64 << 20);
BENCHMARK_CAPTURE(copies, plain, false, 1)->Arg(8 << 20);
BENCHMARK_CAPTURE(copies, stream_read_and_written, true, 2)->Arg(64 << 20);

}  // namespace
}  // namespace tessera::collective

int main(int argc, char** argv) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("tessera-group-bench." + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
  ::setenv("TESSERA_RUNTIME_DIR", folder.c_str(), 1);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  std::filesystem::remove_all(folder);
  return 0;
}
