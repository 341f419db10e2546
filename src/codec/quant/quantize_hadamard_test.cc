// The random Hadamard transform on the way to NVFP4's column plane.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

QuantSpec hadamard_spec(NvScaling scaling = NvScaling::k1x16) {
  QuantSpec spec = nvfp4_spec(scaling);
  spec.hadamard = true;
  return spec;
}

float hadamard_amax(const TestMatrix& m) {
  return oracle::amax(oracle::hadamard(oracle::transpose(m.oracle())));
}

class HadamardTest : public EveryKernelTest {};

// The transform of a unit vector is a row of the signed matrix, which is built here by Sylvester's construction.
TEST_P(HadamardTest, UnitVectorsShowTheMatrix) {
  constexpr int kSigns[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  std::array<std::array<int, 16>, 16> h{};
  h[0][0] = 1;
  for (size_t n = 1; n < 16; n *= 2) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) {
        h[i + n][j] = h[i][j + n] = h[i][j];
        h[i + n][j + n] = -h[i][j];
      }
    }
  }
  TestMatrix unit(DType::kBF16, 16, 16);
  unit.fill(0);
  for (int64_t i = 0; i < 16; ++i) unit.set(i, i, 1);
  EXPECT_EQ(compute_hadamard_amax(unit.view()), (Amax{.25F, 0, -1}));
  const OraclePlane got = quantized(unit.view(), hadamard_spec(), Plane::kColumn, .25F);
  EXPECT_EQ(got.scales, std::vector(16, std::byte{0x7E}));
  for (size_t i = 0; i < 16; ++i) {
    for (size_t j = 0; j < 16; ++j) {
      const auto pair = static_cast<unsigned>(got.codes[i * 8 + j / 2]);
      EXPECT_EQ(j % 2 == 0 ? pair % 16 : pair / 16, kSigns[i] * h[i][j] > 0 ? 7U : 15U) << i << ", " << j;
    }
  }
}

TEST_P(HadamardTest, GivesTheOraclesBytes) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{16, 1},   {16, 2},    {32, 17}, {48, 33},
                                                     {144, 20}, {16, 1030}, {272, 4}};
  for (const auto& [rows, columns] : kShapes) {
    const TestMatrix m = random_matrix(DType::kBF16, rows, columns, 31, {1, 2});
    const OracleMatrix values = m.oracle();
    const float amax = hadamard_amax(m);
    EXPECT_EQ(compute_hadamard_amax(m.view()), (Amax{amax, 0, -1}));
    for (const NvScaling scaling : {NvScaling::k1x16, NvScaling::k16x16}) {
      for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
        QuantSpec spec = hadamard_spec(scaling);
        spec.rounding = rounding;
        spec.seed = 3;
        SCOPED_TRACE(describe(spec, Plane::kColumn, m.dtype(), rows, columns));
        const OraclePlane want = oracle_quantize(values, spec, Plane::kColumn, amax);
        EXPECT_EQ(difference(quantized(m.view(), spec, Plane::kColumn, amax), want), "");
        if (columns % 2 != 0) continue;
        // Its row plane is unchanged, with a separate amax.
        TestPlane row(spec, Plane::kRow, rows, columns);
        TestPlane column(spec, Plane::kColumn, rows, columns);
        const float row_amax = oracle::amax(values);
        quantize(m.view(), spec, {row_amax, amax}, {row.memory(), column.memory()});
        EXPECT_EQ(difference(column.get(), want), "");
        spec.hadamard = false;
        EXPECT_EQ(difference(row.get(), oracle_quantize(values, spec, Plane::kRow, row_amax)), "");
      }
    }
  }
}

// Whether large terms that cancel absorb small ones depends on the order.
TEST_P(HadamardTest, AddsInOrder) {
  constexpr float kTerms[] = {0x1p30F, -0x1p30F, 0x1.8p28F, 3, -5, 0x1p-4F, 200, -0x1p7F};
  TestMatrix m(DType::kBF16, 64, 40);
  std::mt19937 random(2);
  for (int64_t r = 0; r < m.rows(); ++r)
    for (int64_t c = 0; c < m.columns(); ++c) m.set(r, c, kTerms[random() % std::size(kTerms)]);
  EXPECT_EQ(compute_hadamard_amax(m.view()).value, hadamard_amax(m));
  for (const float amax : {0x1p32F, 0x1p20F, 60.0F}) {
    EXPECT_EQ(difference(quantized(m.view(), hadamard_spec(), Plane::kColumn, amax),
                         oracle_quantize(m.oracle(), hadamard_spec(), Plane::kColumn, amax)),
              "")
        << amax;
  }
}

// A whole group is NaN if one of its elements is; infinities of both signs make one, too.
TEST_P(HadamardTest, WhatIsNotFiniteSpreadsOverItsGroupOf16) {
  constexpr float kInf16 = std::numeric_limits<float>::infinity();
  TestMatrix m = random_matrix(DType::kBF16, 48, 6, 33);
  m.set(3, 0, std::numeric_limits<float>::quiet_NaN());
  m.set(20, 1, kInf16);
  m.set(40, 2, kInf16);
  m.set(47, 2, -kInf16);
  const Amax amax = compute_hadamard_amax(m.view());
  EXPECT_EQ(amax.value, kInf16);
  EXPECT_EQ(amax.nonfinite, 4) << "of the matrix itself";
  EXPECT_EQ(amax.first_nonfinite, 3 * 6);
  const QuantSpec spec = propagating(hadamard_spec());
  for (const float given : {kInf16, 3.0F}) {
    EXPECT_EQ(difference(quantized(m.view(), spec, Plane::kColumn, given),
                         oracle_quantize(m.oracle(), spec, Plane::kColumn, given)),
              "");
  }
}

TEST_P(HadamardTest, ZerosOfAnySignAreZeros) {
  TestMatrix m(DType::kBF16, 16, 4);
  m.fill(-0.0F);
  EXPECT_EQ(compute_hadamard_amax(m.view()), (Amax{0, 0, -1}));
  EXPECT_EQ(difference(quantized(m.view(), hadamard_spec(), Plane::kColumn, 0),
                       oracle_quantize(m.oracle(), hadamard_spec(), Plane::kColumn, 0)),
            "");
}

TEST_P(HadamardTest, AmaxIsTheSameByAnyNumberOfThreads) {
  const TestMatrix m = random_matrix(DType::kBF16, 1040, 1100, 34, {4, 0});
  const Amax one = compute_hadamard_amax(m.view());
  for (const int threads : {2, 3, 0}) EXPECT_EQ(compute_hadamard_amax(m.view(), {threads}), one);
  EXPECT_EQ(compute_hadamard_amax({nullptr, DType::kBF16, 0, 16, 16}), Amax{});
  EXPECT_EQ(compute_hadamard_amax({nullptr, DType::kBF16, 16, 0, 0}), Amax{});
}

INSTANTIATE_TEST_SUITE_P(Kernels, HadamardTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
