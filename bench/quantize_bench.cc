// Quantised formats: amaxes, planes and decoding, on one thread and on two, each with its share of the streaming-copy
// ceiling, measured in the same run with as many threads (bytes read plus bytes written, per second):
//
//   build/cpu/bin/quantize_bench [FILTER]         lines whose name contains FILTER
//
// TESSERA_FORCE_KERNEL chooses the variant. The matrix does not fit the caches. Times are the best of several: with one
// thread it is CPU time, which other load on the machine does not affect; with two it is wall time.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "codec/simd/cast.h"
#include "codec/simd/digest.h"
#include "codec/simd/kernel.h"
#include "codec/simd/stream.h"
#include "tessera/quantize.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 8192;
constexpr int64_t kColumns = 8192;
constexpr size_t kElements = static_cast<size_t>(kRows * kColumns);
constexpr int kRepeats = 7;

double seconds_of(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double best_seconds(int threads, const std::function<void()>& body) {
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  double best = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    const double start = seconds_of(clock);
    body();
    best = std::min(best, seconds_of(clock) - start);
  }
  return best;
}

// `body(first, rows)` for halves of the rows.
void split_rows(int threads, const std::function<void(int64_t, int64_t)>& body) {
  std::vector<std::thread> others;
  const int64_t step = kRows / threads;
  for (int t = 1; t < threads; ++t) others.emplace_back([&, t] { body(t * step, step); });
  body(0, step);
  for (std::thread& thread : others) thread.join();
}

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    for (std::vector<std::byte>* memory : {&f32_, &from_, &to_}) memory->resize(kElements * sizeof(float));
    uint32_t state = 1;
    for (size_t i = 0; i < kElements; ++i) {
      state = state * 1664525 + 1013904223;
      const float value = (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F) * 0.05F;
      std::memcpy(f32_.data() + i * sizeof(float), &value, sizeof(value));
    }
    cast_row(DType::kF32, DType::kBF16)(f32_.data(), bf16_.data(), kElements);
    cast_row(DType::kF32, DType::kF16)(f32_.data(), f16_.data(), kElements);
    std::printf("%s, %lld x %lld; GB/s of bytes read and written, of the copy ceiling\n",
                std::string(active_kernel()).c_str(), static_cast<long long>(kRows), static_cast<long long>(kColumns));
    for (const int threads : {1, 2}) {
      const double seconds = best_seconds(threads, [&] {
        split_rows(threads, [&](int64_t first, int64_t rows) {
          const auto begin = static_cast<size_t>(first * kColumns) * sizeof(float);
          copy_stream(to_.data() + begin, f32_.data() + begin, static_cast<size_t>(rows * kColumns) * sizeof(float));
          stream_fence();
        });
      });
      ceiling_[threads] = 2 * static_cast<double>(kElements * sizeof(float)) / seconds;
      std::printf("streaming copy, %d thread(s): %.1f GB/s\n", threads, ceiling_[threads] * 1e-9);
    }
    std::printf("%-44s %14s %14s\n", "", "1 thread", "2 threads");
  }

  void line(const std::string& name, double bytes, const std::function<void(int)>& body) {
    if (name.find(filter_) == std::string::npos) return;
    std::printf("%-44s", name.c_str());
    for (const int threads : {1, 2}) {
      const double rate = bytes / best_seconds(threads, [&] { body(threads); });
      std::printf(" %6.1f (%.3f)", rate * 1e-9, rate / ceiling_[threads]);
      std::fflush(stdout);
    }
    std::printf("\n");
  }

  MatrixView matrix(DType dtype) const {
    const auto& memory = dtype == DType::kF32 ? f32_ : dtype == DType::kF16 ? f16_ : bf16_;
    return {memory.data(), dtype, kRows, kColumns, kColumns};
  }
  std::byte* to() { return to_.data(); }
  std::byte* from() { return from_.data(); }

 private:
  std::string filter_;
  double ceiling_[3] = {};
  std::vector<std::byte> f32_;
  std::vector<std::byte> from_;
  std::vector<std::byte> to_;
  std::vector<std::byte> bf16_ = std::vector<std::byte>(kElements * 2);
  std::vector<std::byte> f16_ = std::vector<std::byte>(kElements * 2);
};

double bytes_of_matrix(DType dtype) {
  return static_cast<double>(bytes_of(dtype, static_cast<int64_t>(kElements)));
}

PlaneMemory place(std::byte*& next, const PlaneShape& shape) {
  PlaneMemory memory{next, shape.code_row_bytes(), next + shape.code_bytes(), shape.scale_row_bytes()};
  next += (shape.code_bytes() + shape.scale_bytes() + 4095) / 4096 * 4096;
  return memory;
}

struct Variant {
  std::string name;
  QuantSpec spec;
};

void bench_casts(Bench& bench) {
  for (const DType from : {DType::kF32, DType::kBF16}) {
    for (const DType to : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E5M2}) {
      if (from == to) continue;
      const CastRow row = cast_row_stream(from, to);
      bench.line("cast " + std::string(to_string(from)) + " to " + std::string(to_string(to)),
                 bytes_of_matrix(from) + bytes_of_matrix(to), [&](int threads) {
                   split_rows(threads, [&](int64_t first, int64_t rows) {
                     row(static_cast<const std::byte*>(bench.matrix(from).data) + bytes_of(from, first * kColumns),
                         bench.to() + bytes_of(to, first * kColumns), static_cast<size_t>(rows * kColumns));
                     stream_fence();
                   });
                 });
    }
  }
}

void bench_digest(Bench& bench) {
  bench.line("digest (bytes read)", bytes_of_matrix(DType::kF32), [&](int threads) {
    split_rows(threads, [&](int64_t first, int64_t rows) {
      Digest digest;
      const auto offset = static_cast<uint64_t>(bytes_of(DType::kF32, first * kColumns));
      digest_bytes(digest, offset, static_cast<const std::byte*>(bench.matrix(DType::kF32).data) + offset,
                   static_cast<size_t>(bytes_of(DType::kF32, rows * kColumns)));
      volatile uint64_t sink = digest.d[0];
      static_cast<void>(sink);
    });
  });
}

void bench_planes(Bench& bench, const Variant& variant, DType input) {
  const MatrixView matrix = bench.matrix(input);
  const std::string name = variant.name + " of " + std::string(to_string(input));
  const PlaneShape row = plane_shape(variant.spec, Plane::kRow, kRows, kColumns);
  const PlaneShape column = plane_shape(variant.spec, Plane::kColumn, kRows, kColumns);
  const float amax = compute_amax({&matrix, 1}, {2})[0].value;
  std::byte* next = bench.to();
  Planes both;
  both.row = place(next, row);
  both.column = place(next, column);
  Planes row_alone = both;
  row_alone.column = {};
  Planes column_alone = both;
  column_alone.row = {};
  const double read = bytes_of_matrix(input);
  const auto row_bytes = static_cast<double>(row.code_bytes() + row.scale_bytes());
  const auto column_bytes = static_cast<double>(column.code_bytes() + column.scale_bytes());
  const auto run = [&](const Planes& planes) {
    return [&, planes](int threads) { quantize(matrix, variant.spec, {amax, amax}, planes, {threads}); };
  };
  bench.line(name + ", row", read + row_bytes, run(row_alone));
  if (needs_amax(variant.spec.format)) {
    bench.line(name + ", amax and row", read + row_bytes, [&](int threads) {
      const float found = compute_amax({&matrix, 1}, {threads})[0].value;
      quantize(matrix, variant.spec, {found, found}, row_alone, {threads});
    });
  }
  bench.line(name + ", column", read + column_bytes, run(column_alone));
  bench.line(name + ", both", read + row_bytes + column_bytes, run(both));
  bench.line(name + ", row then column", read + row_bytes + column_bytes, [&](int threads) {
    quantize(matrix, variant.spec, {amax, amax}, row_alone, {threads});
    quantize(matrix, variant.spec, {amax, amax}, column_alone, {threads});
  });
  bench.line(name + ", back", read + row_bytes, [&](int threads) {
    dequantize(variant.spec, Plane::kRow,
               {both.row.codes, both.row.code_stride, both.row.scales, both.row.scale_stride}, amax,
               {bench.from(), input, kRows, kColumns, kColumns}, {threads});
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  Bench bench(argc > 1 ? argv[1] : "");
  bench_casts(bench);
  bench_digest(bench);
  for (const DType input : {DType::kBF16, DType::kF32, DType::kF16}) {
    const MatrixView matrix = bench.matrix(input);
    bench.line("amax of " + std::string(to_string(input)) + " (bytes read)", bytes_of_matrix(input),
               [&](int threads) { compute_amax({&matrix, 1}, {threads}); });
  }
  const Variant kVariants[] = {
      {"mxfp8", {.format = Format::kMxfp8}},
      {"nvfp4 16x16", {.format = Format::kNvfp4}},
      {"nvfp4 1x16", {.format = Format::kNvfp4, .scaling = NvScaling::k1x16}},
      {"nvfp4 1x16 stochastic",
       {.format = Format::kNvfp4, .scaling = NvScaling::k1x16, .rounding = Rounding::kStochastic, .seed = 1}},
      {"nvfp4 1x16 hadamard", {.format = Format::kNvfp4, .scaling = NvScaling::k1x16, .hadamard = true}},
      {"fp8_e4m3", {.format = Format::kFp8E4M3}},
      {"fp8_block_1x128", {.format = Format::kFp8Block1x128}},
      {"fp8_block_128x128", {.format = Format::kFp8Block128x128}},
  };
  for (const Variant& variant : kVariants) {
    for (const DType input : {DType::kBF16, DType::kF32}) {
      if (variant.spec.hadamard && input != DType::kBF16) continue;
      bench_planes(bench, variant, input);
    }
  }
}
