#include <gtest/gtest.h>

#include <cfloat>
#include <limits>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

constexpr float kInf32 = std::numeric_limits<float>::infinity();

// Codes and scales, not necessarily written by a quantiser.
struct Stored {
  OraclePlane plane;
  int64_t rows;
  int64_t columns;
};

// Byte `b` of codes is at place b of every row, under that row's scale.
template <typename AppendScale>
Stored every_code(const QuantSpec& spec, int64_t scales, AppendScale append) {
  const int64_t width = spec.format == Format::kNvfp4 ? 512 : 256;
  Stored stored{{}, scales, width};
  const int64_t across = oracle::ceil_div(width, oracle::block_of(spec).columns);
  for (int64_t r = 0; r < scales; ++r) {
    for (int b = 0; b < 256; ++b) stored.plane.codes.push_back(static_cast<std::byte>(b));
    for (int64_t i = 0; i < across; ++i) append(stored.plane.scales, r);
  }
  return stored;
}

void expect_values(const Stored& stored, const QuantSpec& spec, Plane plane, float amax) {
  for (const DType dtype : kQuantizable) {
    SCOPED_TRACE(describe(spec, plane, dtype, stored.rows, stored.columns) + ", amax " + std::to_string(amax));
    const OracleMatrix want = oracle_dequantize(stored.plane, spec, plane, amax, dtype, stored.rows, stored.columns);
    with_every_kernel([&] {
      const TestMatrix got = dequantized(stored.plane, spec, plane, amax, dtype, stored.rows, stored.columns);
      ASSERT_EQ(difference(got, want), "");
    });
  }
}

// The same plane, in columns.
Stored turned(const Stored& stored, const QuantSpec& spec) {
  Stored result{stored.plane, stored.columns, stored.rows};
  if (!oracle::is_mxfp8(spec.format)) return result;
  result.plane.codes = oracle::transpose_bytes(stored.plane.codes, stored.rows, stored.columns);
  result.plane.scales = oracle::transpose_bytes(stored.plane.scales, stored.rows,
                                                oracle::ceil_div(stored.columns, oracle::block_of(spec).columns));
  return result;
}

TEST(DequantizeTest, EveryCodeUnderEveryScaleOfABlock) {
  const auto byte = [](std::vector<std::byte>& scales, int64_t r) { scales.push_back(static_cast<std::byte>(r)); };
  for (const Format format : {Format::kMxfp8, Format::kMxfp8E5M2}) {
    const QuantSpec spec = spec_of(format);
    const Stored stored = every_code(spec, 256, byte);
    expect_values(stored, spec, Plane::kRow, 0);
    expect_values(turned(stored, spec), spec, Plane::kColumn, 0);
  }
  for (const float amax : {0.0F, 5.0F, 1e-38F, 7.5e35F, kInf32}) {
    const QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
    const Stored stored = every_code(spec, 256, byte);
    expect_values(stored, spec, Plane::kRow, amax);
    if (amax == 5) expect_values(turned(stored, spec), nvfp4_spec(NvScaling::k16x16), Plane::kColumn, amax);
  }
}

constexpr float kScales[] = {
    0,           1,       1.0F / 3,        .1F,     1.0F / 448, 1e-38F, FLT_TRUE_MIN,
    1 / FLT_MAX, FLT_MIN, FLT_MAX / 57344, FLT_MAX, kInf32,     -1,     std::numeric_limits<float>::quiet_NaN()};

TEST(DequantizeTest, EveryCodeUnderScalesOfEverySize) {
  const auto scale = [](std::vector<std::byte>& scales, int64_t r) {
    oracle::append(scales, oracle::f32_bits(kScales[r]), 4);
  };
  const QuantSpec blocks = spec_of(Format::kFp8Block1x128);
  const Stored stored = every_code(blocks, std::size(kScales), scale);
  expect_values(stored, blocks, Plane::kRow, 0);
  expect_values(turned(stored, blocks), blocks, Plane::kColumn, 0);
  for (const Format format : {Format::kFp8E4M3, Format::kFp8E5M2, Format::kFp8Block128x128}) {
    for (const float one : kScales) {
      Stored codes{{}, 2, 128};
      for (int b = 0; b < 256; ++b) codes.plane.codes.push_back(static_cast<std::byte>(b));
      oracle::append(codes.plane.scales, oracle::f32_bits(one), 4);
      expect_values(codes, spec_of(format), Plane::kRow, 0);
      expect_values(turned(codes, spec_of(format)), spec_of(format), Plane::kColumn, 0);
    }
  }
}

// Tails, odd strides and addresses; gaps between rows stay untouched.
TEST(DequantizeTest, WritesItsElementsAloneAtAnyAddress) {
  for (const QuantSpec& spec : every_spec()) {
    for (int64_t n = 1; n < 300; n += n < 36 ? 1 : 17) {
      const int64_t rows = n % 2 == 0 ? n : 34;
      const int64_t columns = n % 2 == 0 ? 38 : n;
      const DType dtype = kQuantizable[n % 3];
      for (const Plane plane : kPlanes) {
        if (!is_packable(spec, plane, rows, columns)) continue;
        SCOPED_TRACE(describe(spec, plane, dtype, rows, columns));
        const TestMatrix m = random_matrix(dtype, rows, columns, static_cast<uint32_t>(n));
        const float amax = oracle_amax(m);
        const OraclePlane stored = oracle_quantize(m.oracle(), spec, plane, amax);
        const OracleMatrix want = oracle_dequantize(stored, spec, plane, amax, dtype, rows, columns);
        TestPlane from(spec, plane, rows, columns, {n % 5, 1}, {n % 3, 2});
        from.put(stored);
        with_every_kernel([&] {
          TestMatrix to(dtype, rows, columns, {n % 4, static_cast<size_t>(n % 7)});
          dequantize(spec, plane, from.source(), amax, to.memory());
          ASSERT_EQ(difference(to, want), "");
          ASSERT_TRUE(to.intact());
        });
        ASSERT_FALSE(HasFatalFailure());
      }
    }
  }
}

TEST(DequantizeTest, AMatrixWithoutElementsIsLeftAlone) {
  for (const QuantSpec& spec : every_spec()) {
    for (const Plane plane : kPlanes) {
      EXPECT_NO_THROW(dequantize(spec, plane, {}, 1, {nullptr, DType::kF32, 0, 64, 64}));
      EXPECT_NO_THROW(dequantize(spec, plane, {}, 1, {nullptr, DType::kBF16, 64, 0, 0}));
    }
  }
}

}  // namespace
}  // namespace tessera
