// Decoding of quantised planes on one thread, in bands of 128 rows as a gather reads them:
//
//   build/cpu/bin/decode_bench [FILTER]         lines whose name contains FILTER
//
// Figures are GB/s of bytes written, and in brackets their share of what copy_stream writes, measured just before and
// just after each line. "streamed" and "stored" matrices do not fit the caches; a "cached" band is decoded again and
// again to the same place. CPU time, the best of several, so that other load counts little. TESSERA_FORCE_KERNEL
// chooses the variant.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "codec/quant/decode.h"
#include "codec/simd/cast.h"
#include "codec/simd/kernel.h"
#include "codec/simd/stream.h"
#include "tessera/quantize.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 8192;
constexpr int64_t kColumns = 8192;
constexpr int64_t kBand = 128;
constexpr auto kElements = static_cast<size_t>(kRows * kColumns);
constexpr int kRepeats = 5;
constexpr int kCachedRepeats = 50;

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double best_seconds(int repeats, const std::function<void()>& body) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double start = cpu_seconds();
    body();
    best = std::min(best, cpu_seconds() - start);
  }
  return best;
}

struct Variant {
  std::string name;
  QuantSpec spec;
};

class Bench {
 public:
  explicit Bench(std::string filter) : filter_(std::move(filter)) {
    uint32_t state = 1;
    for (size_t i = 0; i < kElements; ++i) {
      state = state * 1664525 + 1013904223;
      const float value = (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F) * 0.05F;
      std::memcpy(f32_.data() + i * sizeof(float), &value, sizeof(value));
    }
    std::printf("%s, %lld x %lld; GB/s written (share of a streaming copy)\n", std::string(active_kernel()).c_str(),
                static_cast<long long>(kRows), static_cast<long long>(kColumns));
    std::printf("%-40s %16s %16s %16s\n", "", "streamed", "stored", "cached");
  }

  void planes(const Variant& variant) {
    const MatrixView matrix{f32_.data(), DType::kF32, kRows, kColumns, kColumns};
    for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
      if (!wanted(variant.name + ", " + std::string(to_string(plane)))) continue;
      const PlaneShape shape = plane_shape(variant.spec, plane, kRows, kColumns);
      const PlaneMemory memory{plane_.data(), shape.code_row_bytes(), plane_.data() + shape.code_bytes(),
                               shape.scale_row_bytes()};
      Planes planes;
      (plane == Plane::kRow ? planes.row : planes.column) = memory;
      quantize(matrix, variant.spec, {kAmax, kAmax}, planes, {2});
      const ConstPlaneMemory from{memory.codes, memory.code_stride, memory.scales, memory.scale_stride};
      for (const DType to : {DType::kF32, DType::kBF16, DType::kF16}) {
        const codec::PlaneDecoder decoder(variant.spec, plane, kColumns, to);
        const auto band = [&](int64_t row, int64_t place, bool stream) {
          std::byte* data = to_.data() + bytes_of(to, place * kColumns);
          decoder.rows(from, kRows, row, kBand, kAmax, {data, to, kBand, kColumns, kColumns}, stream);
        };
        const auto all = [&](bool stream) {
          for (int64_t row = 0; row < kRows; row += kBand) band(row, row, stream);
          stream_fence();
        };
        line(variant.name + ", " + std::string(to_string(plane)) + ", to " + std::string(to_string(to)), to,
             {[&] { all(true); }, [&] { all(false); }, [&] { band(0, 0, false); }});
      }
    }
  }

  void cast() {
    for (const DType from : {DType::kBF16, DType::kF32}) {
      const DType to = from == DType::kF32 ? DType::kBF16 : DType::kF32;
      const auto rows = [&](CastRow row, int64_t n) {
        row(f32_.data(), to_.data(), static_cast<size_t>(n * kColumns));
        stream_fence();
      };
      const std::string name = "cast " + std::string(to_string(from)) + " to " + std::string(to_string(to));
      if (!wanted(name)) continue;
      line(name, to,
           {[&] { rows(cast_row_stream(from, to), kRows); }, [&] { rows(cast_row(from, to), kRows); },
            [&] { rows(cast_row(from, to), kBand); }});
    }
  }

 private:
  static constexpr float kAmax = 0.025F;

  struct Bodies {
    std::function<void()> streamed;
    std::function<void()> stored;
    std::function<void()> cached;  // one band
  };

  bool wanted(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  double copy_rate() {
    const size_t bytes = kElements * sizeof(float);
    return static_cast<double>(bytes) / best_seconds(kRepeats, [&] {
             copy_stream(to_.data(), f32_.data(), bytes);
             stream_fence();
           });
  }

  void line(const std::string& name, DType to, const Bodies& bodies) {
    const auto whole = static_cast<double>(bytes_of(to, kRows * kColumns));
    double ceiling = copy_rate();
    const double rates[] = {whole / best_seconds(kRepeats, bodies.streamed),
                            whole / best_seconds(kRepeats, bodies.stored),
                            whole * kBand / kRows / best_seconds(kCachedRepeats, bodies.cached)};
    ceiling = (ceiling + copy_rate()) / 2;
    std::printf("%-40s", name.c_str());
    for (const double rate : rates) std::printf(" %7.1f (%6.3f)", rate * 1e-9, rate / ceiling);
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string filter_;
  std::vector<std::byte> f32_ = std::vector<std::byte>(kElements * sizeof(float));
  std::vector<std::byte> plane_ = std::vector<std::byte>(2 * kElements);
  std::vector<std::byte> to_ = std::vector<std::byte>(kElements * sizeof(float));
};

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  Bench bench(argc > 1 ? argv[1] : "");
  bench.cast();
  const Variant kVariants[] = {
      {"fp8_e4m3", {.format = Format::kFp8E4M3}},
      {"fp8_e5m2", {.format = Format::kFp8E5M2}},
      {"fp8_block_1x128", {.format = Format::kFp8Block1x128}},
      {"fp8_block_128x128", {.format = Format::kFp8Block128x128}},
      {"mxfp8", {.format = Format::kMxfp8}},
      {"mxfp8_e5m2", {.format = Format::kMxfp8E5M2}},
      {"nvfp4 16x16", {.format = Format::kNvfp4}},
      {"nvfp4 1x16", {.format = Format::kNvfp4, .scaling = NvScaling::k1x16}},
  };
  for (const Variant& variant : kVariants) bench.planes(variant);
}
