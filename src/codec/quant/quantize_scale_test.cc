// Scales of FP8 formats, for tensors and for blocks.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <random>

#include "codec/quant/quantize_testing.h"

namespace tessera {
namespace {

constexpr float kInfiniteAmax = std::numeric_limits<float>::infinity();

float scale_at(const OraclePlane& plane, size_t i = 0) {
  float scale = 0;
  std::memcpy(&scale, plane.scales.data() + 4 * i, 4);
  return scale;
}

struct ScaleCase {
  Format format;
  float amax;
  float eps;
  bool power_of_two;
  int margin;
  float scale;  // the multiplier of elements
};

class Fp8ScaleTest : public EveryKernelTest {};

TEST_P(Fp8ScaleTest, OfATensor) {
  constexpr Format k4 = Format::kFp8E4M3;
  constexpr Format k5 = Format::kFp8E5M2;
  const ScaleCase cases[] = {
      {k4, 448, 0, false, 0, 1},
      {k4, 1, 0, false, 0, 448},
      {k5, 1, 0, false, 0, 57344},
      {k4, 3, 0, false, 0, 448.0F / 3},
      {k4, 3, 0, true, 0, 128},
      {k4, 3.5F, 0, true, 0, 128},  // exactly
      {k4, 3.6F, 0, true, 0, 64},
      {k5, 3, 0, true, 0, 16384},
      {k4, 1, 0, false, 3, 56},
      {k4, 1, 0, false, -2, 1792},
      {k4, 1, 0, true, 1, 128},
      {k4, 1, 0, false, 64, 0x1.cp-56F},
      {k4, 0, 0, false, 0, 1},
      {k4, 0, 0, true, 5, 1},
      {k4, 0, .5F, false, 0, 896},
      {k4, .25F, .5F, false, 0, 896},
      {k4, .75F, .5F, false, 0, 448 / .75F},
      {k4, kInfiniteAmax, 0, false, 0, 1},
      {k4, kInfiniteAmax, .5F, true, 2, 1},
      {k4, 1e-38F, 0, false, 0, FLT_MAX},
      {k4, 1e-38F, 0, true, 0, 0x1p127F},
      {k4, FLT_TRUE_MIN, 0, false, 0, FLT_MAX},
      {k5, 1e-35F, 0, false, 0, FLT_MAX},
      {k4, 1e-38F, 1e-10F, false, 0, 448 / 1e-10F},
      {k4, 448, 0, false, -64, 0x1p64F},
      {k4, FLT_MAX, 0, false, 0, 448 / FLT_MAX},
      {k4, FLT_MAX, 0, true, 64, 0},
  };
  const TestMatrix m = random_matrix(DType::kF32, 4, 40, 3);
  for (const ScaleCase& c : cases) {
    SCOPED_TRACE("amax " + std::to_string(c.amax) + ", eps " + std::to_string(c.eps) + ", margin " +
                 std::to_string(c.margin) + (c.power_of_two ? ", power of two" : ""));
    QuantSpec spec = propagating(spec_of(c.format));
    spec.eps = c.eps;
    spec.power_of_two = c.power_of_two;
    spec.margin = c.margin;
    for (const Plane plane : kPlanes) {
      const OraclePlane got = quantized(m.view(), spec, plane, c.amax);
      EXPECT_EQ(std::bit_cast<uint32_t>(scale_at(got)), std::bit_cast<uint32_t>(1 / c.scale));
      EXPECT_EQ(static_cast<uint32_t>(got.codes[0]),
                oracle::fp8(c.format).encode(static_cast<double>(m.get(0, 0) * c.scale)));
      EXPECT_EQ(difference(got, oracle_quantize(m.oracle(), spec, plane, c.amax)), "");
    }
  }
}

TEST_P(Fp8ScaleTest, OfATensorWithAnyOptions) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponent(-140, 127);
  const TestMatrix m = random_matrix(DType::kBF16, 2, 40, 3);
  const OracleMatrix values = m.oracle();
  for (int i = 0; i < 2000; ++i) {
    QuantSpec spec = spec_of(i % 2 == 0 ? Format::kFp8E4M3 : Format::kFp8E5M2);
    spec.eps = i % 3 == 0 ? std::exp2(exponent(random)) : 0;
    if (i % 5 < 2) spec.power_of_two = i % 5 == 0;
    spec.margin = i % 7 == 0 ? static_cast<int>(random() % 129) - 64 : 0;
    const float amax = std::exp2(exponent(random));
    ASSERT_EQ(
        difference(quantized(m.view(), spec, Plane::kRow, amax), oracle_quantize(values, spec, Plane::kRow, amax)), "")
        << describe(spec) << ", amax " << amax << ", eps " << spec.eps << ", margin " << spec.margin;
  }
}

// An empty tensor's scale may be one that would overflow, and there is no history yet.
TEST_P(Fp8ScaleTest, OfAHistoryWithoutValuesIsOne) {
  const AmaxHistory history;
  const TestMatrix m = random_matrix(DType::kF32, 2, 8, 3);
  EXPECT_EQ(scale_at(quantized(m.view(), spec_of(Format::kFp8E4M3), Plane::kRow, history.amax())), 1);
}

TEST_P(Fp8ScaleTest, OfBlocksIsAPowerOfTwoUnlessTurnedOff) {
  const TestMatrix m = random_matrix(DType::kBF16, 130, 260, 12);
  for (const Format format : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
    for (const Plane plane : kPlanes) {
      const QuantSpec spec = spec_of(format);
      QuantSpec on = spec;
      on.power_of_two = true;
      QuantSpec off = spec;
      off.power_of_two = false;
      const OraclePlane by_default = quantized(m.view(), spec, plane, 0);
      EXPECT_EQ(by_default, quantized(m.view(), on, plane, 0));
      EXPECT_NE(by_default, quantized(m.view(), off, plane, 0));
      for (size_t i = 0; i < by_default.scales.size() / 4; ++i) {
        int e = 0;
        EXPECT_EQ(std::frexp(scale_at(by_default, i), &e), .5F) << i;
      }
      // Blocks ignore the tensor's amax.
      EXPECT_EQ(by_default, quantized(m.view(), spec, plane, 1234));
    }
  }
  for (const Format format : {Format::kFp8E4M3, Format::kFp8E5M2}) {
    QuantSpec off = spec_of(format);
    off.power_of_two = false;
    EXPECT_EQ(quantized(m.view(), spec_of(format), Plane::kRow, 3), quantized(m.view(), off, Plane::kRow, 3));
  }
}

TEST_P(Fp8ScaleTest, OfABlockThatOverflowsIsTheInputsLargestNumber) {
  struct Overflow {
    DType dtype;
    bool power_of_two;
    float scale;
  };
  const float largest_bf16 = std::bit_cast<float>(0x7F7F0000);
  for (const auto& [dtype, power_of_two, scale] :
       {Overflow{DType::kF32, false, FLT_MAX}, Overflow{DType::kBF16, false, largest_bf16},
        Overflow{DType::kF32, true, 0x1p127F}, Overflow{DType::kBF16, true, 0x1p127F}}) {
    TestMatrix m(dtype, 1, 3);
    m.fill(0x1p-130F);
    QuantSpec spec = spec_of(Format::kFp8Block1x128);
    spec.power_of_two = power_of_two;
    EXPECT_EQ(scale_at(quantized(m.view(), spec, Plane::kRow, 0)), 1 / scale);
    EXPECT_EQ(scale_at(quantized(m.view(), spec, Plane::kColumn, 0), 2), 1 / scale);
  }
}

TEST_P(Fp8ScaleTest, OfABlockOfZerosOrWithInfinityIsOne) {
  for (const Format format : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
    TestMatrix m(DType::kF32, 3, 130);
    m.fill(0);
    m.set(0, 129, -kInfiniteAmax);
    m.set(1, 129, 500);
    const OraclePlane got = quantized(m.view(), propagating(spec_of(format)), Plane::kRow, 0);
    EXPECT_EQ(scale_at(got, 0), 1);
    EXPECT_EQ(scale_at(got, 1), 1);
    EXPECT_EQ(got.codes[129], std::byte{0xFE}) << "-448";
    EXPECT_EQ(difference(got, oracle_quantize(m.oracle(), spec_of(format), Plane::kRow, 0)), "");
  }
}

TEST_P(Fp8ScaleTest, OfABlockTakesEps) {
  const TestMatrix m = random_matrix(DType::kF16, 4, 300, 13);
  for (const Format format : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
    QuantSpec spec = spec_of(format);
    spec.eps = 40;  // more than all blocks' amaxes
    for (const Plane plane : kPlanes)
      EXPECT_EQ(difference(quantized(m.view(), spec, plane, 0), oracle_quantize(m.oracle(), spec, plane, 0)), "");
    EXPECT_NE(quantized(m.view(), spec, Plane::kRow, 0), quantized(m.view(), spec_of(format), Plane::kRow, 0));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Fp8ScaleTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
