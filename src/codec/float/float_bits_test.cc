#include "codec/float/float_bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "codec/float/float_oracle.h"

namespace tessera {
namespace {

uint32_t bits(float value) {
  return std::bit_cast<uint32_t>(value);
}
float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

struct Codec {
  const char* name;
  const FloatOracle& (*oracle)();
  std::function<uint32_t(float)> encode;
  std::function<float(uint32_t)> decode;
};

const Codec kCodecs[] = {
    {"f16", f16_oracle, f16_from_f32, [](uint32_t c) { return f32_from_f16(static_cast<uint16_t>(c)); }},
    {"bf16", bf16_oracle, bf16_from_f32, [](uint32_t c) { return f32_from_bf16(static_cast<uint16_t>(c)); }},
    {"e4m3", e4m3_oracle, e4m3_from_f32, [](uint32_t c) { return f32_from_e4m3(static_cast<uint8_t>(c)); }},
    {"e5m2", e5m2_oracle, e5m2_from_f32, [](uint32_t c) { return f32_from_e5m2(static_cast<uint8_t>(c)); }},
};

class FloatBitsTest : public testing::TestWithParam<Codec> {};

TEST_P(FloatBitsTest, EveryCodeDecodesToItsValue) {
  const FloatOracle& oracle = GetParam().oracle();
  for (uint32_t code = 0; code < 2 * oracle.sign_bit(); ++code) {
    const double expected = oracle.decode(code);
    const uint32_t expected_bits = std::isnan(expected) ? 0x7FC00000 : bits(static_cast<float>(expected));
    ASSERT_EQ(bits(GetParam().decode(code)), expected_bits) << "code " << code;
  }
}

TEST_P(FloatBitsTest, EveryValueAndEveryMidpointAndTheirNeighboursEncodeToTheNearest) {
  const FloatOracle& oracle = GetParam().oracle();
  std::vector<double> marks = oracle.values();
  for (size_t i = 1; i < oracle.values().size(); ++i)
    marks.push_back((oracle.values()[i - 1] + oracle.values()[i]) / 2);
  marks.push_back((oracle.values().back() + oracle.overflow()) / 2);
  marks.push_back(oracle.overflow());
  for (const double mark : marks) {
    const uint32_t centre = bits(static_cast<float>(mark));  // bf16 overflows to infinity
    for (int64_t pattern = int64_t{centre} - 2; pattern <= int64_t{centre} + 2; ++pattern) {
      if (pattern < 0) continue;
      for (const uint32_t sign : {0U, 0x80000000U}) {
        const float x = from_bits(static_cast<uint32_t>(pattern) | sign);
        ASSERT_EQ(GetParam().encode(x), oracle.encode(x)) << std::hexfloat << x;
      }
    }
  }
}

TEST_P(FloatBitsTest, RandomBitPatternsEncodeToTheNearest) {
  std::mt19937 random(7);
  for (int i = 0; i < 200'000; ++i) {
    const float x = from_bits(static_cast<uint32_t>(random()));
    ASSERT_EQ(GetParam().encode(x), GetParam().oracle().encode(x)) << std::hexfloat << x;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, FloatBitsTest, testing::ValuesIn(kCodecs),
                         [](const auto& codec) { return std::string(codec.param.name); });

TEST(FloatBitsEdgeTest, InfinityStaysOrSaturatesAndNaNIsCanonical) {
  const float infinity = from_bits(0x7F800000);
  const float negative_nan = from_bits(0xFF800001);
  EXPECT_EQ(f16_from_f32(infinity), 0x7C00);
  EXPECT_EQ(f16_from_f32(65520), 0x7C00) << "half way to the number after the largest";
  EXPECT_EQ(f16_from_f32(65519.996F), 0x7BFF);
  EXPECT_EQ(bf16_from_f32(-infinity), 0xFF80);
  EXPECT_EQ(e4m3_from_f32(infinity), 0x7E);
  EXPECT_EQ(e4m3_from_f32(-1e9F), 0xFE);
  EXPECT_EQ(e5m2_from_f32(infinity), 0x7B);
  EXPECT_EQ(e5m2_from_f32(-61440), 0xFB);
  EXPECT_EQ(f16_from_f32(negative_nan), 0x7E00);
  EXPECT_EQ(bf16_from_f32(negative_nan), 0x7FC0);
  EXPECT_EQ(e4m3_from_f32(negative_nan), 0x7F);
  EXPECT_EQ(e5m2_from_f32(negative_nan), 0x7F);
  EXPECT_EQ(bits(f32_from_bf16(0xFF81)), 0x7FC00000U);
  EXPECT_EQ(bits(f32_from_f64(-std::nan("1"))), 0x7FC00000U);
  EXPECT_EQ(std::bit_cast<uint64_t>(f64_from_f32(negative_nan)), 0x7FF8000000000000U);
  EXPECT_EQ(f16_from_f32(-0.0F), 0x8000) << "the sign of zero is kept";
}

TEST(FloatBitsEdgeTest, E8M0IsABarePowerOfTwo) {
  for (int code = 0; code < 255; ++code)
    EXPECT_EQ(f32_from_e8m0(static_cast<uint8_t>(code)), std::ldexp(1.0F, code - 127)) << code;
  EXPECT_EQ(bits(f32_from_e8m0(255)), 0x7FC00000U);
}

TEST(FloatBitsEdgeTest, E2M1HasSixteenCodes) {
  const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 16; ++code) {
    EXPECT_EQ(std::fabs(f32_from_e2m1(code)), magnitudes[code % 8]);
    EXPECT_EQ(std::signbit(f32_from_e2m1(code)), code >= 8) << "-0 too";
  }
}

struct TorchRow {
  uint32_t f32;
  uint16_t f16;
  uint16_t bf16;
  uint8_t e4m3;
  uint8_t e5m2;
};
constexpr TorchRow kTorchRows[] = {
#include "codec/testdata/torch_encode.inc"
};
// Bits of f32 by code.
constexpr uint32_t kTorchE4M3[] = {
#include "codec/testdata/torch_e4m3.inc"
};
constexpr uint32_t kTorchE5M2[] = {
#include "codec/testdata/torch_e5m2.inc"
};
constexpr uint32_t kTorchE8M0[] = {
#include "codec/testdata/torch_e8m0.inc"
};

TEST(TorchCastTest, EncodingAgreesWithTorch) {
  for (const TorchRow& row : kTorchRows) {
    const float x = from_bits(row.f32);
    const bool nan = std::isnan(x);
    EXPECT_EQ(f16_from_f32(x), nan ? kNaNF16 : row.f16) << std::hexfloat << x;
    EXPECT_EQ(bf16_from_f32(x), nan ? kNaNBF16 : row.bf16) << std::hexfloat << x;
    EXPECT_EQ(e4m3_from_f32(x), nan ? kNaNF8 : row.e4m3) << std::hexfloat << x;
    // From here on torch gives infinity where this project saturates.
    if (nan || std::fabs(x) < 61440) {
      EXPECT_EQ(e5m2_from_f32(x), nan ? kNaNF8 : row.e5m2) << std::hexfloat << x;
    }
  }
}

TEST(TorchCastTest, DecodingAgreesWithTorch) {
  const auto canonical = [](uint32_t pattern) { return std::isnan(from_bits(pattern)) ? kNaNF32 : pattern; };
  static_assert(std::size(kTorchE4M3) == 256 && std::size(kTorchE5M2) == 256 && std::size(kTorchE8M0) == 256);
  for (uint32_t code = 0; code < 256; ++code) {
    EXPECT_EQ(bits(f32_from_e4m3(static_cast<uint8_t>(code))), canonical(kTorchE4M3[code])) << code;
    EXPECT_EQ(bits(f32_from_e5m2(static_cast<uint8_t>(code))), canonical(kTorchE5M2[code])) << code;
    EXPECT_EQ(bits(f32_from_e8m0(static_cast<uint8_t>(code))), canonical(kTorchE8M0[code])) << code;
  }
}

}  // namespace
}  // namespace tessera
