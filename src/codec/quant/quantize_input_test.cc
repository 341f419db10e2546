// Every 16-bit input, and f32 where rounding changes, through every format and plane.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <limits>
#include <set>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Amaxes that give large, small and no scales, and a saturated one for nvfp4.
std::vector<float> amaxes_for(const QuantSpec& spec) {
  if (!needs_amax(spec.format)) return {0};
  return {kInfinity, 1, 448, 3.7e-3F, 1e-38F};
}

void expect_plane(const TestMatrix& m, const OracleMatrix& values, const QuantSpec& spec, Plane plane, float amax) {
  if (!is_packable(spec, plane, m.rows(), m.columns())) return;
  SCOPED_TRACE(describe(spec, plane, m.dtype(), m.rows(), m.columns()) + ", amax " + std::to_string(amax));
  const OraclePlane want = oracle_quantize(values, spec, plane, amax);
  with_every_kernel([&] { ASSERT_EQ(difference(quantized(m.view(), spec, plane, amax), want), ""); });
}

void expect_both_planes(const TestMatrix& m, const OracleMatrix& values, const QuantSpec& spec, float amax) {
  for (const Plane plane : kPlanes) expect_plane(m, values, spec, plane, amax);
}

void expect_every_format(const TestMatrix& m) {
  const OracleMatrix values = m.oracle();
  for (const QuantSpec& spec : every_spec()) {
    for (const float amax : amaxes_for(spec)) {
      expect_both_planes(m, values, propagating(spec), amax);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

class QuantizeInputTest : public testing::TestWithParam<DType> {};

TEST_P(QuantizeInputTest, EveryValueAmongItsNeighbours) {
  TestMatrix m(GetParam(), 256, 256);
  for (uint32_t code = 0; code < 65536; ++code) m.set_bits(code / 256, code % 256, code);
  expect_every_format(m);
}

// Blocks of a single row or column are clipped to one value each, and a zero if codes come in pairs.
TEST_P(QuantizeInputTest, EveryValueAloneInItsBlock) {
  for (const int64_t width : {1, 2}) {
    TestMatrix rows(GetParam(), 65536, width);
    TestMatrix columns(GetParam(), width, 65536);
    rows.fill(0);
    columns.fill(0);
    for (uint32_t code = 0; code < 65536; ++code) {
      rows.set_bits(code, code % static_cast<uint32_t>(width), code);
      columns.set_bits(code % static_cast<uint32_t>(width), code, code);
    }
    const OracleMatrix row_values = rows.oracle();
    const OracleMatrix column_values = columns.oracle();
    for (const QuantSpec& spec : every_spec()) {
      const bool pairs = spec.format == Format::kNvfp4;
      if (oracle::block_of(spec).rows == 0 || pairs != (width == 2)) continue;
      expect_plane(rows, row_values, propagating(spec), Plane::kRow, 448);
      expect_plane(columns, column_values, propagating(spec), Plane::kColumn, 448);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

// One element in each 16 of a row and of a column is the anchor, which fixes the scales of smaller values.
TestMatrix with_anchors(DType dtype, const std::vector<uint32_t>& patterns, float anchor) {
  constexpr int64_t kColumns = 256;
  const int64_t rows = oracle::ceil_div(static_cast<int64_t>(patterns.size()), kColumns / 16 * 15);
  TestMatrix m(dtype, rows + rows % 2, kColumns);
  size_t next = 0;
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      if ((r + c) % 16 == 0)
        m.set(r, c, anchor);
      else
        m.set_bits(r, c, patterns[next++ % patterns.size()]);
    }
  }
  return m;
}

TEST_P(QuantizeInputTest, EveryValueBesideALargerOne) {
  std::vector<uint32_t> patterns;
  for (uint32_t code = 0; code < 65536; ++code) patterns.push_back(code);
  for (const float anchor : {1.0F, 450.0F, oracle::largest_of(GetParam())}) {
    expect_every_format(with_anchors(GetParam(), patterns, anchor));
    ASSERT_FALSE(HasFatalFailure());
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, QuantizeInputTest, testing::Values(DType::kF16, DType::kBF16), dtype_name);

// Signed, a few steps of f32 around each value.
void append_around(std::vector<uint32_t>& patterns, double value) {
  const auto centre = static_cast<int64_t>(std::bit_cast<uint32_t>(static_cast<float>(value)));
  for (int64_t step = -2; step <= 2; ++step) {
    const int64_t bits = centre + step;
    if (bits < 0 || bits > 0x7F800000) continue;
    patterns.push_back(static_cast<uint32_t>(bits));
    patterns.push_back(static_cast<uint32_t>(bits) | 0x80000000);
  }
}

std::vector<double> codes_of(Format format) {
  if (format == Format::kNvfp4) return {std::begin(oracle::kMagnitudes), std::end(oracle::kMagnitudes)};
  return oracle::fp8(format).values();
}

// Inputs that the multiplier takes to a code's value, half-way between two codes, or past the last.
std::vector<uint32_t> boundaries(Format format, float multiplier) {
  const std::vector<double> values = codes_of(format);
  const double last_step = values.back() - values[values.size() - 2];
  std::vector<uint32_t> patterns;
  for (size_t i = 0; i < values.size(); ++i) {
    const double next = i + 1 < values.size() ? values[i + 1] : values[i] + last_step;
    append_around(patterns, values[i] / double{multiplier});
    append_around(patterns, (values[i] + next) / 2 / double{multiplier});
  }
  return patterns;
}

TEST(QuantizeF32Test, ValuesAroundEveryRoundingBoundaryAfterScaling) {
  for (const QuantSpec& spec : every_spec()) {
    for (const float anchor : {6.0F, 448.0F, 3.7F, 1.5e-3F, 7.7e20F, 3.1e-30F, 1.2e-38F}) {
      const float multiplier = oracle::scale_of(spec, DType::kF32, anchor, anchor).multiplier;
      const TestMatrix m = with_anchors(DType::kF32, boundaries(spec.format, multiplier), anchor);
      expect_both_planes(m, m.oracle(), propagating(spec), anchor);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

TEST(QuantizeF32Test, SpecialValuesBesideEachOther) {
  std::vector<uint32_t> patterns{0x7FC00000, 0x7F800001, 0xFFFFFFFF};
  for (const double value : {0.0, double{FLT_TRUE_MIN} * 3, double{FLT_MIN}, double{FLT_MIN} / 2, 1.0, double{FLT_MAX}})
    append_around(patterns, value);
  for (const float anchor : {0.0F, FLT_TRUE_MIN, FLT_MIN, 1.0F, FLT_MAX, kInfinity}) {
    expect_every_format(with_anchors(DType::kF32, patterns, anchor));
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(QuantizeF32Test, BesideEveryValueOfBf16) {
  TestMatrix m(DType::kF32, 768, 256);
  for (uint32_t i = 0; i < 3 * 65536; ++i) m.set_bits(i / 256, i % 256, i / 3 << 16 | (0x7FFF + i % 3));
  expect_every_format(m);
}

// Magnitudes at which a scale changes, each by itself in its block.
TEST(QuantizeF32Test, EveryScaleThatABlockCanHave) {
  for (const Format format : {Format::kMxfp8, Format::kMxfp8E5M2}) {
    std::vector<uint32_t> patterns{0, 0x7F800000};
    for (int e = -149; e < 128; ++e) {
      append_around(patterns, std::ldexp(double{oracle::largest_fp8(format)}, e));
      append_around(patterns, std::ldexp(1.0, e));
    }
    const auto n = static_cast<int64_t>(patterns.size());
    TestMatrix m(DType::kF32, n, 1);
    for (int64_t i = 0; i < n; ++i) m.set_bits(i, 0, patterns[static_cast<size_t>(i)]);
    const QuantSpec spec = propagating(spec_of(format));
    expect_both_planes(m, m.oracle(), spec, 0);
    std::set<int> seen;
    for (const std::byte b : quantized(m.view(), spec, Plane::kRow, 0).scales) seen.insert(static_cast<int>(b));
    const int last = oracle::e8m0(FLT_MAX / oracle::largest_fp8(format));
    EXPECT_EQ(seen.size(), static_cast<size_t>(last) + 2) << "0 to " << last << ", and 254 for infinity";
    EXPECT_EQ(*seen.rbegin(), 254);
  }
  std::vector<uint32_t> patterns;
  const std::vector<double>& values = e4m3_oracle().values();
  for (size_t i = 0; i < values.size(); ++i) {
    append_around(patterns, 6 * values[i]);
    if (i > 0) append_around(patterns, 3 * (values[i] + values[i - 1]));
  }
  TestMatrix m(DType::kF32, static_cast<int64_t>(patterns.size()), 2);
  m.fill(0);
  for (int64_t i = 0; i < m.rows(); ++i) m.set_bits(i, i % 2, patterns[static_cast<size_t>(i)]);
  const QuantSpec spec = nvfp4_spec(NvScaling::k1x16);
  expect_both_planes(m, m.oracle(), spec, 2688);
  std::set<int> seen;
  for (const std::byte b : quantized(m.view(), spec, Plane::kRow, 2688).scales) seen.insert(static_cast<int>(b));
  EXPECT_EQ(seen.size(), values.size()) << "every finite one";
}

}  // namespace
}  // namespace tessera
