#include "codec/quant/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <thread>
#include <vector>

#include "codec/quant/quantize_testing.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/stream.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Kernels: compared with the scalar ones, which DequantizeTest compares with the formulas
// ------------------------------

constexpr size_t kBlocks[] = {codec::kEach, 16, 32, 128, codec::kWholeRow};
constexpr size_t kE2M1 = 2;  // as the tables of kernels number codes

size_t element_bytes(size_t type) {
  return static_cast<size_t>(bytes_of(kQuantizable[type], 1));
}
size_t code_bytes(size_t code, size_t n) {
  return code == kE2M1 ? (n + 1) / 2 : n;
}

struct Kernel {
  std::string name;
  codec::DecodeRow row;
};
// All of the active variant that must give the results of `row`.
std::vector<Kernel> kernels_of(size_t code, size_t type, bool by_powers) {
  const codec::DecodeKernels& kernels = *codec::active_kernels().decode;
  std::vector<Kernel> all{{"row", kernels.row[code][type]}, {"stream_row", kernels.stream_row[code][type]}};
  if (by_powers) {
    all.push_back({"row_by_powers", kernels.row_by_powers[code][type]});
    all.push_back({"stream_row_by_powers", kernels.stream_row_by_powers[code][type]});
  }
  return all;
}

std::vector<std::byte> decoded(codec::DecodeRow row, const std::vector<std::byte>& codes, size_t n, size_t block,
                               const std::vector<float>& scales, size_t type, size_t misalignment = 0) {
  GuardedBytes to(n * element_bytes(type), misalignment);
  row(codes.data(), n, block, scales.data(), to.data());
  stream_fence();
  EXPECT_TRUE(to.intact());
  return {to.data(), to.data() + to.size()};
}

// Every byte, once a scale.
void expect_every_code(const std::vector<float>& scales, bool by_powers) {
  constexpr size_t kBytes = 256;
  for (size_t code = 0; code < codec::kCodeTypes; ++code) {
    const size_t width = code == kE2M1 ? 2 * kBytes : kBytes;
    std::vector<std::byte> codes(scales.size() * kBytes);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i % kBytes);
    std::vector<float> each;
    for (const float scale : scales) each.insert(each.end(), width, scale);
    for (size_t type = 0; type < codec::kQuantizedTypes; ++type) {
      const auto want = decoded(codec::scalar_decode().row[code][type], codes, each.size(), codec::kEach, each, type);
      with_every_kernel([&] {
        for (const Kernel& kernel : kernels_of(code, type, by_powers)) {
          SCOPED_TRACE(kernel.name + ", code type " + std::to_string(code) + " to " +
                       std::string(to_string(kQuantizable[type])));
          ASSERT_EQ(difference(decoded(kernel.row, codes, each.size(), codec::kEach, each, type), want), "");
        }
      });
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(DecodeKernelTest, EveryCodeByEveryExponent) {
  std::vector<float> scales;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const uint32_t mantissa : {0U, 1U, 0x2AAAAAU, 0x400000U, 0x48AF3CU, 0x7FFFFFU}) {
      scales.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
      scales.push_back(std::bit_cast<float>(0x80000000 | exponent << 23 | mantissa));
    }
  }
  expect_every_code(scales, false);
}

// Products half-way between two values of the narrower types, and right beside.
TEST(DecodeKernelTest, TiesAreRoundedToEven) {
  std::vector<float> scales;
  for (const uint32_t exponent : {1U, 100U, 110U, 115U, 127U, 140U, 254U})
    for (uint32_t high = 0; high < 128; high += 3)
      for (const uint32_t low : {0x0FFFU, 0x1000U, 0x1001U, 0x3000U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
        scales.push_back(std::bit_cast<float>(exponent << 23 | high << 16 | low));
  expect_every_code(scales, false);
}

TEST(DecodeKernelTest, EveryCodeByEveryPower) {
  std::vector<float> scales;
  for (int power = codec::kLeastPower; power <= codec::kMostPower; ++power) scales.push_back(power_of_two(power));
  expect_every_code(scales, true);
}

TEST(DecodeKernelTest, RowsOfAnyLengthAtAnyAddress) {
  const std::vector<std::byte> codes = random_bytes(2400, 1);
  std::vector<float> scales(2400);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = power_of_two(static_cast<int>(i % 13) - 6);
  for (size_t code = 0; code < codec::kCodeTypes; ++code) {
    for (size_t type = 0; type < codec::kQuantizedTypes; ++type) {
      for (const size_t block : kBlocks) {
        for (size_t n = 0; n < 2400; n += n < 140 ? 1 : 251) {
          const std::vector<std::byte> some(codes.begin(), codes.begin() + static_cast<ptrdiff_t>(code_bytes(code, n)));
          const auto want = decoded(codec::scalar_decode().row[code][type], some, n, block, scales, type);
          with_every_kernel([&] {
            for (const Kernel& kernel : kernels_of(code, type, true))
              for (const size_t misalignment : {size_t{0}, n % 7, size_t{16}})
                ASSERT_EQ(difference(decoded(kernel.row, some, n, block, scales, type, misalignment), want), "")
                    << kernel.name << ", code type " << code << ", n " << n << ", block " << block;
          });
          ASSERT_FALSE(HasFatalFailure());
        }
      }
    }
  }
}

// Bands ---------------------------------------------------------------------------------------------------------------

// Decodes a plane piece by piece, in bands that begin at multiples of 16.
class BandTest : public testing::TestWithParam<Plane> {};

struct BandCase {
  int64_t rows;
  int64_t columns;
  int64_t band;
};
constexpr BandCase kBandCases[] = {
    {272, 256, 128},  // whole blocks, tiles and lines
    {150, 1100, 48},  // more than a piece of columns
    {146, 530, 16},   // clipped blocks
    {98, 34, 48},    {34, 2, 32}, {2, 1298, 16},
};

void decode_in_bands(const QuantSpec& spec, Plane plane, TestPlane& from, float amax, int64_t band, bool stream,
                     TestMatrix& to) {
  const codec::PlaneDecoder decoder(spec, plane, to.columns(), to.dtype());
  const MatrixMemory whole = to.memory();
  for (int64_t row = 0; row < whole.rows; row += band) {
    const int64_t rows = std::min(band, whole.rows - row);
    std::byte* data = static_cast<std::byte*>(whole.data) + bytes_of(whole.dtype, row * whole.row_stride);
    decoder.rows(from.source(), whole.rows, row, rows, amax, {data, whole.dtype, rows, whole.columns, whole.row_stride},
                 stream);
  }
  stream_fence();
}

TEST_P(BandTest, AllBandsTogetherAreTheWhole) {
  const Plane plane = GetParam();
  uint32_t seed = 0;
  for (const QuantSpec& spec : every_spec()) {
    for (const BandCase& shape : kBandCases) {
      const DType dtype = kQuantizable[++seed % 3];
      SCOPED_TRACE(describe(spec, plane, dtype, shape.rows, shape.columns));
      const TestMatrix m = random_matrix(dtype, shape.rows, shape.columns, seed);
      const float amax = oracle_amax(m);
      const OraclePlane stored = oracle_quantize(m.oracle(), spec, plane, amax);
      const OracleMatrix want = oracle_dequantize(stored, spec, plane, amax, dtype, shape.rows, shape.columns);
      TestPlane from(spec, plane, shape.rows, shape.columns, {seed % 5, 1}, {seed % 3, 2});
      from.put(stored);
      with_every_kernel([&] {
        for (const bool stream : {false, true}) {
          for (const Spacing spacing : {Spacing{}, Spacing{static_cast<int64_t>(seed % 4), seed % 9}}) {
            TestMatrix to(dtype, shape.rows, shape.columns, spacing);
            decode_in_bands(spec, plane, from, amax, shape.band, stream, to);
            ASSERT_EQ(difference(to, want), "") << "stream " << stream;
            ASSERT_TRUE(to.intact());
          }
        }
      });
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

// A shard is a plane of its own, whose blocks count from its first row.
TEST_P(BandTest, ShardsGiveTheWhole) {
  const Plane plane = GetParam();
  constexpr int64_t kShard = 256;
  constexpr int64_t kColumns = 200;
  for (const QuantSpec& spec : every_spec()) {
    SCOPED_TRACE(describe(spec, plane, DType::kBF16, 2 * kShard, kColumns));
    const TestMatrix m = random_matrix(DType::kBF16, 2 * kShard, kColumns, 5);
    const float amax = oracle_amax(m);
    const OraclePlane whole = oracle_quantize(m.oracle(), spec, plane, amax);
    const OracleMatrix want = oracle_dequantize(whole, spec, plane, amax, DType::kF32, 2 * kShard, kColumns);
    const codec::PlaneDecoder decoder(spec, plane, kColumns, DType::kF32);
    TestMatrix to(DType::kF32, 2 * kShard, kColumns);
    for (int64_t first = 0; first < 2 * kShard; first += kShard) {
      TestPlane shard(spec, plane, kShard, kColumns);
      quantize(m.part(first, kShard, 0, kColumns), spec, {amax, amax}, one_plane(plane, shard.memory()), {},
               {.first_row = first, .first_column = 0, .rows = 2 * kShard, .columns = kColumns});
      MatrixMemory place = to.memory();
      place.data = static_cast<std::byte*>(place.data) + bytes_of(place.dtype, first * place.row_stride);
      place.rows = kShard;
      decoder.rows(shard.source(), kShard, 0, kShard, amax, place, false);
    }
    EXPECT_EQ(difference(to, want), "");
  }
}

TEST_P(BandTest, BoxesOfColumnsGiveTheWhole) {
  const Plane plane = GetParam();
  constexpr int64_t kRows = 160;
  constexpr int64_t kColumns = 700;
  for (const QuantSpec& spec : every_spec()) {
    SCOPED_TRACE(describe(spec, plane, DType::kF16, kRows, kColumns));
    const TestMatrix m = random_matrix(DType::kF16, kRows, kColumns, 9);
    const float amax = oracle_amax(m);
    const OraclePlane stored = oracle_quantize(m.oracle(), spec, plane, amax);
    TestPlane from(spec, plane, kRows, kColumns);
    from.put(stored);
    const codec::PlaneDecoder decoder(spec, plane, kColumns, DType::kF16);
    TestMatrix to(DType::kF16, kRows, kColumns);
    const MatrixMemory whole = to.memory();
    for (const auto& [column, columns] : {std::pair<int64_t, int64_t>{0, 128}, {128, 384}, {512, 188}}) {
      for (const auto& [row, rows] : {std::pair<int64_t, int64_t>{0, 48}, {48, 112}}) {
        std::byte* data = static_cast<std::byte*>(whole.data) + bytes_of(whole.dtype, row * whole.row_stride + column);
        decoder.box(from.source(), kRows, {.first_row = row, .rows = rows, .first_column = column, .columns = columns},
                    amax, {data, whole.dtype, rows, columns, whole.row_stride}, true);
      }
    }
    stream_fence();
    EXPECT_EQ(difference(to, oracle_dequantize(stored, spec, plane, amax, DType::kF16, kRows, kColumns)), "");
  }
}

TEST_P(BandTest, ThreadsShareADecoder) {
  const Plane plane = GetParam();
  const QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
  constexpr int64_t kRows = 512;
  constexpr int64_t kColumns = 256;
  constexpr int64_t kBand = 128;
  const TestMatrix m = random_matrix(DType::kF32, kRows, kColumns, 3);
  const float amax = oracle_amax(m);
  const OraclePlane stored = oracle_quantize(m.oracle(), spec, plane, amax);
  TestPlane from(spec, plane, kRows, kColumns);
  from.put(stored);
  const codec::PlaneDecoder decoder(spec, plane, kColumns, DType::kF32);
  TestMatrix to(DType::kF32, kRows, kColumns);
  const MatrixMemory whole = to.memory();
  std::vector<std::thread> threads;
  for (int64_t row = 0; row < kRows; row += kBand) {
    threads.emplace_back([&, row] {
      std::byte* data = static_cast<std::byte*>(whole.data) + bytes_of(whole.dtype, row * whole.row_stride);
      decoder.rows(from.source(), kRows, row, kBand, amax, {data, whole.dtype, kBand, kColumns, whole.row_stride},
                   true);
      stream_fence();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(difference(to, oracle_dequantize(stored, spec, plane, amax, DType::kF32, kRows, kColumns)), "");
}

std::string plane_name(const testing::TestParamInfo<Plane>& plane) {
  return std::string(to_string(plane.param));
}
INSTANTIATE_TEST_SUITE_P(Planes, BandTest, testing::ValuesIn(kPlanes), plane_name);

TEST(PlaneDecoderTest, WhatCannotBeDecodedIsRefused) {
  QuantSpec hadamard = nvfp4_spec(NvScaling::k1x16);
  hadamard.hadamard = true;
  EXPECT_THROW(codec::PlaneDecoder(hadamard, Plane::kColumn, 64, DType::kBF16), Error);
  EXPECT_NO_THROW(codec::PlaneDecoder(hadamard, Plane::kRow, 64, DType::kBF16));
  EXPECT_THROW(codec::PlaneDecoder(spec_of(Format::kMxfp8), Plane::kRow, 64, DType::kF64), Error);
  EXPECT_THROW(codec::PlaneDecoder(nvfp4_spec(NvScaling::k1x16), Plane::kRow, 63, DType::kF32), Error);
}

TEST(PlaneDecoderDeathTest, SizesThatDisagreeAreNotDecoded) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
  TestPlane from(spec, Plane::kColumn, 64, 32);
  TestMatrix to(DType::kF32, 16, 32);
  const codec::PlaneDecoder decoder(spec, Plane::kColumn, 32, DType::kF32);
  MatrixMemory wrong = to.memory();
  wrong.dtype = DType::kBF16;
  const auto decode = [&](int64_t first_row, int64_t rows, const MatrixMemory& into) {
    decoder.rows(from.source(), 64, first_row, rows, 1, into, false);
  };
  EXPECT_DEATH(decode(56, 16, to.memory()), "broken invariant") << "beyond the plane";
  EXPECT_DEATH(decode(0, 8, to.memory()), "broken invariant") << "`to` has other rows";
  EXPECT_DEATH(decode(1, 16, to.memory()), "broken invariant") << "in the middle of a pair";
  EXPECT_DEATH(decode(0, 16, wrong), "broken invariant");
}

}  // namespace
}  // namespace tessera
