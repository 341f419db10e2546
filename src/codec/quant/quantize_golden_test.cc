#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <limits>

#include "codec/quant/quantize_testing.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<int> ints(const std::vector<std::byte>& bytes) {
  std::vector<int> result;
  for (const std::byte b : bytes) result.push_back(static_cast<int>(b));
  return result;
}

TestMatrix row_of_values(DType dtype, const std::vector<float>& values) {
  TestMatrix m(dtype, 1, static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) m.set(0, static_cast<int64_t>(i), values[i]);
  return m;
}

// Numbers that were computed by hand or come from the formats' specifications.
class QuantizeGoldenTest : public EveryKernelTest {};

TEST_P(QuantizeGoldenTest, TheForcedVariantIsTheOneThatRuns) {
  EXPECT_EQ(active_kernel(), GetParam());
  const codec::KernelSet& kernels = codec::active_kernels();
  EXPECT_EQ(kernels.amax->target, GetParam());
  EXPECT_EQ(kernels.scale->target, GetParam());
  EXPECT_EQ(kernels.quantize->target, GetParam());
  EXPECT_EQ(kernels.transpose->target, GetParam());
}

TEST_P(QuantizeGoldenTest, Nvfp4OfSixteenValues) {
  const std::vector<float> values{0,  .125F, -.25F, .375F, -.5F,  .625F, -.75F, .875F,
                                  -1, 1.25F, -1.5F, 2,     -2.5F, 3,     -4,    5};
  for (const DType dtype : kQuantizable) {
    const TestMatrix m = row_of_values(dtype, values);
    const OraclePlane got = quantized(m.view(), nvfp4_spec(NvScaling::k1x16), Plane::kRow, 5);
    EXPECT_THAT(ints(got.scales), testing::ElementsAre(0x7E));
    EXPECT_THAT(ints(got.codes), testing::ElementsAre(0x00, 0x19, 0x19, 0x2A, 0x3A, 0x4C, 0x6D, 0x7E));
  }
  EXPECT_EQ(oracle::nvfp4_scale(5, 5).multiplier, 1.1999999284744263F);
}

struct Rounded {
  float value;
  int code;
};

// A block whose largest magnitude is 6 has a multiplier of 1.
TEST_P(QuantizeGoldenTest, Nvfp4RoundsTiesToEvenCodes) {
  const auto above = [](float x) { return std::nextafter(x, 10.0F); };
  const auto below = [](float x) { return std::nextafter(x, 0.0F); };
  const Rounded cases[] = {{0, 0},     {FLT_TRUE_MIN, 0},
                           {.25F, 0},  {above(.25F), 1},
                           {.5F, 1},   {below(.75F), 1},
                           {.75F, 2},  {1, 2},
                           {1.25F, 2}, {above(1.25F), 3},
                           {1.5F, 3},  {below(1.75F), 3},
                           {1.75F, 4}, {2, 4},
                           {2.5F, 4},  {above(2.5F), 5},
                           {3, 5},     {below(3.5F), 5},
                           {3.5F, 6},  {4, 6},
                           {5, 6},     {above(5), 7},
                           {6, 7}};
  for (const auto& [value, code] : cases) {
    const TestMatrix m = row_of_values(DType::kF32, {value, -value, 6, 0});
    const OraclePlane got = quantized(m.view(), nvfp4_spec(NvScaling::k1x16), Plane::kRow, 6);
    EXPECT_THAT(ints(got.scales), testing::ElementsAre(0x7E));
    EXPECT_THAT(ints(got.codes), testing::ElementsAre(code + 16 * (code + 8), 0x07)) << value;
  }
}

TEST_P(QuantizeGoldenTest, NanIsTheLargestCodeOfEachType) {
  for (QuantSpec spec : every_spec()) {
    spec.nonfinite = Nonfinite::kPropagate;
    const TestMatrix m = row_of_values(DType::kF32, {kNan, -kNan, 1, 0});
    const OraclePlane got = quantized(m.view(), spec, Plane::kRow, 1);
    if (spec.format == Format::kNvfp4)
      EXPECT_EQ(ints(got.codes)[0], 0x77) << describe(spec);
    else
      EXPECT_THAT(std::vector(got.codes.begin(), got.codes.begin() + 2), testing::Each(std::byte{0x7F}))
          << describe(spec);
  }
}

TEST_P(QuantizeGoldenTest, Nvfp4OfTheSmallestTensorsSaturatesItsScale) {
  const QuantSpec spec = propagating(nvfp4_spec(NvScaling::k1x16));
  const TestMatrix m = row_of_values(DType::kF32, {1e-38F, -1e-38F, 5e-39F, 0});
  const OraclePlane got = quantized(m.view(), spec, Plane::kRow, 1e-38F);
  // S_enc = FLT_MAX, so 1e-38 * FLT_MAX / 6 = .567 is rounded to .5625, code 0x31, and 1 / (.5625 * S_dec) to FLT_MAX.
  EXPECT_THAT(ints(got.scales), testing::ElementsAre(0x31));
  EXPECT_THAT(ints(got.codes), testing::ElementsAre(5 + 16 * 13, 3));  // of 3.40, -3.40 and 1.70
  EXPECT_EQ(difference(got, oracle_quantize(m.oracle(), spec, Plane::kRow, 1e-38F)), "");
}

TEST_P(QuantizeGoldenTest, Nvfp4OfZerosKeepsTheirSigns) {
  const TestMatrix m = row_of_values(DType::kBF16, {0, -0.0F, -0.0F, 0});
  const OraclePlane got = quantized(m.view(), nvfp4_spec(NvScaling::k16x16), Plane::kRow, 0);
  EXPECT_THAT(ints(got.scales), testing::ElementsAre(0));
  EXPECT_THAT(ints(got.codes), testing::ElementsAre(0x80, 0x08));
  // A block of zeros among others: multiplied by FLT_MAX, and still zero.
  EXPECT_EQ(quantized(m.view(), nvfp4_spec(NvScaling::k1x16), Plane::kRow, 3), got);
}

TEST_P(QuantizeGoldenTest, Nvfp4OfAnInfiniteAmaxHasAGlobalScaleOfOne) {
  const QuantSpec spec = propagating(nvfp4_spec(NvScaling::k1x16));
  const TestMatrix m = row_of_values(DType::kF32, {6, 3, -1, kInf});
  const OraclePlane infinite = quantized(m.view(), spec, Plane::kRow, kInf);
  EXPECT_THAT(ints(infinite.scales), testing::ElementsAre(0x7E));  // 448 * 1: 6 / 448 rounds to code zero
  EXPECT_THAT(ints(infinite.codes), testing::ElementsAre(0x00, 0x78));
  // With S_enc = 1 a block of at most 6 has a scale of 1.
  const TestMatrix finite = row_of_values(DType::kF32, {6, 3, -1, -.5F});
  const OraclePlane one = quantized(finite.view(), spec, Plane::kRow, kInf);
  EXPECT_THAT(ints(one.scales), testing::ElementsAre(0x38));
  EXPECT_THAT(ints(one.codes), testing::ElementsAre(7 + 16 * 5, 10 + 16 * 9));
}

TEST_P(QuantizeGoldenTest, Mxfp8RoundsScalesUpToPowersOfTwo) {
  struct Case {
    uint32_t bits;
    int code;
  };
  // For blk_amax / 448.
  constexpr Case kCases[] = {{0x00000000, 0},   {0x00400000, 0},   {0x00400001, 1},
                             {0x3F800000, 127}, {0x3F800001, 128}, {0x7F7FFFFF, 254}};
  for (const auto& [bits, code] : kCases) EXPECT_EQ(oracle::e8m0(std::bit_cast<float>(bits)), code) << bits;
  EXPECT_EQ(oracle::e8m0(kInf), 254);
  EXPECT_EQ(oracle::e8m0(kNan), 255);

  // Amaxes at those numbers or next to them, since 1/448 rounded is slightly too large.
  const std::vector<std::pair<float, int>> blocks{{448.0F, 128},
                                                  {std::nextafter(448.0F, 0.0F), 127},
                                                  {224.0F, 127},
                                                  {0.0F, 0},
                                                  {FLT_TRUE_MIN, 0},
                                                  {std::ldexp(448.0F, -128), 0},
                                                  {FLT_MAX, 247},
                                                  {std::ldexp(1.0F, 127), 246},
                                                  {std::ldexp(1.75F, -119), 0},
                                                  {std::ldexp(1.7500002F, -119), 1}};
  for (const auto& [amax, near] : blocks) {
    const TestMatrix m = row_of_values(DType::kF32, {amax});
    const OraclePlane got = quantized(m.view(), spec_of(Format::kMxfp8), Plane::kRow, 0);
    EXPECT_EQ(ints(got.scales)[0], oracle::e8m0(amax * (1.0F / 448.0F))) << amax;
    EXPECT_LE(std::abs(ints(got.scales)[0] - near), 1) << amax;
  }
  const TestMatrix infinite = row_of_values(DType::kF32, {kInf, 1, -kInf});
  const OraclePlane got = quantized(infinite.view(), propagating(spec_of(Format::kMxfp8)), Plane::kRow, 0);
  EXPECT_THAT(ints(got.scales), testing::ElementsAre(254));
  EXPECT_THAT(ints(got.codes), testing::ElementsAre(0x7E, 0x00, 0xFE)) << "infinity saturates";
}

INSTANTIATE_TEST_SUITE_P(Kernels, QuantizeGoldenTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
