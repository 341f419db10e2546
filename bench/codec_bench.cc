// The codec's kernels on one thread, each with its share of the streaming-copy ceiling measured in the same run:
//
//   build/cpu/bin/codec_bench [--benchmark_filter=REGEX]
//
// TESSERA_FORCE_KERNEL chooses the variant. "of_ceiling" is bytes read per second over those that copy_stream copies
// per second between buffers of the same size. Buffers of 256 MiB do not fit a cache; those of 256 KiB do.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>

#include "codec/simd/cast.h"
#include "codec/simd/digest.h"
#include "codec/simd/kernel.h"
#include "codec/simd/reduce.h"
#include "codec/simd/stream.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr size_t kLarge = size_t{256} << 20;
constexpr size_t kSmall = size_t{256} << 10;

// Two buffers, touched, never freed: source and destination of everything here.
struct Buffers {
  std::byte* src = make();
  std::byte* dst = make();

  static const Buffers& get() {
    static const Buffers buffers;
    return buffers;
  }

 private:
  static std::byte* make() {
    auto* bytes = static_cast<std::byte*>(std::aligned_alloc(4096, kLarge));
    for (size_t i = 0; i < kLarge; i += sizeof(uint32_t)) {
      const float value = static_cast<float>(i % 1'000'003) * 1e-3F;
      std::memcpy(bytes + i, &value, sizeof(value));
    }
    return bytes;
  }
};

// CPU time of this thread: other load on the machine does not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Bytes per second; the best of nine.
double streaming_copy_ceiling() {
  static const double ceiling = [] {
    const Buffers& buffers = Buffers::get();
    double best = 0;
    for (int i = 0; i < 9; ++i) {
      const double start = cpu_seconds();
      copy_stream(buffers.dst, buffers.src, kLarge);
      stream_fence();
      best = std::max(best, static_cast<double>(kLarge) / (cpu_seconds() - start));
    }
    return best;
  }();
  return ceiling;
}

void report(benchmark::State& state, size_t bytes_read) {
  const double bytes = static_cast<double>(bytes_read) * static_cast<double>(state.iterations());
  state.SetBytesProcessed(static_cast<int64_t>(bytes));
  state.counters["of_ceiling"] = benchmark::Counter(bytes / streaming_copy_ceiling(), benchmark::Counter::kIsRate);
}

void copy_memcpy(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    std::memcpy(Buffers::get().dst, Buffers::get().src, size);
    benchmark::ClobberMemory();
  }
  report(state, size);
}

// A matrix with rows of 16 KiB, from which columns of pieces are read; the pieces are packed. It visits all columns, so
// that every byte of the source is read once.
constexpr size_t kImageStride = 16384;
constexpr size_t kRows = 1024;
template <typename PerBlock>
void for_each_block(size_t row_bytes, PerBlock per_block) {
  const Buffers& buffers = Buffers::get();
  size_t done = 0;
  for (size_t first = 0; first + kRows * kImageStride <= kLarge; first += kRows * kImageStride) {
    for (size_t column = 0; column < kImageStride; column += row_bytes, done += row_bytes * kRows)
      per_block(first + column, buffers.src + first + column, buffers.dst + done);
  }
}

void copy_rows(benchmark::State& state) {
  const auto row_bytes = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    for_each_block(row_bytes, [&](size_t /*offset*/, const std::byte* src, std::byte* dst) {
      copy_stream_rows(dst, static_cast<ptrdiff_t>(row_bytes), src, kImageStride, row_bytes, kRows);
    });
    stream_fence();
  }
  report(state, kLarge);
}

void digest_contiguous(benchmark::State& state) {
  const auto size = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    Digest digest;
    digest_bytes(digest, 0, Buffers::get().src, size);
    benchmark::DoNotOptimize(digest);
  }
  report(state, size);
}

void digest_strided(benchmark::State& state) {
  const auto row_bytes = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    Digest digest;
    for_each_block(row_bytes, [&](size_t offset, const std::byte* src, std::byte* /*dst*/) {
      digest_rows(digest, offset, kImageStride, src, kImageStride, row_bytes, kRows);
    });
    benchmark::DoNotOptimize(digest);
  }
  report(state, kLarge);
}

void digest_and_copy(benchmark::State& state) {
  const auto row_bytes = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    Digest digest;
    for_each_block(row_bytes, [&](size_t offset, const std::byte* src, std::byte* dst) {
      digest_copy_rows(digest, offset, kImageStride, dst, static_cast<ptrdiff_t>(row_bytes), src, kImageStride,
                       row_bytes, kRows);
    });
    stream_fence();
    benchmark::DoNotOptimize(digest);
  }
  report(state, kLarge);
}

void cast(benchmark::State& state, DType from, DType to, bool stream, size_t size) {
  const CastRow row = stream ? cast_row_stream(from, to) : cast_row(from, to);
  const auto widest = static_cast<size_t>(std::max(bits_of(from), bits_of(to))) / 8;
  const size_t n = size / widest;
  for (auto _ : state) {
    row(Buffers::get().src, Buffers::get().dst, n);
    stream_fence();
    benchmark::ClobberMemory();
  }
  report(state, n * static_cast<size_t>(bits_of(from)) / 8);
}

void sum(benchmark::State& state, DType dtype) {
  const AccumulateRow row = accumulate_row(ReduceOp::kSum, dtype, false);
  const size_t n = kSmall / 4;
  for (auto _ : state) {
    row(Buffers::get().src, Buffers::get().dst, n);
    benchmark::ClobberMemory();
  }
  report(state, n * static_cast<size_t>(bits_of(dtype)) / 8);
}

void register_casts() {
  constexpr DType kTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2};
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      if (from == to) continue;
      const std::string pair = std::string(to_string(from)) + "_to_" + std::string(to_string(to));
      benchmark::RegisterBenchmark(("cast/cached/" + pair).c_str(),
                                   [=](benchmark::State& state) { cast(state, from, to, false, kSmall); });
    }
  }
  for (const auto& [from, to] : {std::pair{DType::kF32, DType::kBF16}, std::pair{DType::kBF16, DType::kF32},
                                 std::pair{DType::kF32, DType::kF16}, std::pair{DType::kF32, DType::kF8E4M3}}) {
    for (const bool stream : {false, true}) {
      const std::string name = std::string("cast/") + (stream ? "streamed/" : "stored/") +
                               std::string(to_string(from)) + "_to_" + std::string(to_string(to));
      benchmark::RegisterBenchmark(
          name.c_str(), [=, f = from, t = to](benchmark::State& state) { cast(state, f, t, stream, kLarge); });
    }
  }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    benchmark::RegisterBenchmark(("sum/cached/" + std::string(to_string(dtype))).c_str(),
                                 [=](benchmark::State& state) { sum(state, dtype); });
  }
}

BENCHMARK(copy_memcpy)->Arg(kLarge)->Arg(kSmall);
BENCHMARK(copy_rows)->Arg(512)->Arg(1024)->Arg(8192)->Arg(kImageStride);
BENCHMARK(digest_contiguous)->Arg(kLarge)->Arg(kSmall);
BENCHMARK(digest_strided)->Arg(512)->Arg(1024)->Arg(8192);
BENCHMARK(digest_and_copy)->Arg(512)->Arg(1024)->Arg(8192)->Arg(kImageStride);

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) try {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("kernel", std::string(tessera::active_kernel()));
  benchmark::AddCustomContext("streaming copy, GB/s", std::to_string(tessera::streaming_copy_ceiling() * 1e-9));
  tessera::register_casts();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
} catch (const tessera::Error& error) {
  std::fprintf(stderr, "codec_bench: %s\n", error.what());
  return 2;
}
