// The kernels that multiply by powers of two, compared with the reference: every bf16, every power.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "codec/codec_testing.h"
#include "codec/quant/quantize_testing.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace {

constexpr size_t kEveryBF16 = 65536;
constexpr size_t kBF16 = 2;  // as the tables of kernels number types and codes
constexpr size_t kE4M3 = 0;
constexpr size_t kE5M2 = 1;

// 2^(exponent - 127); the lowest is a subnormal power of f32 that block scales can have, the highest NaN.
float multiplier_of(uint32_t exponent) {
  if (exponent == 0) return std::bit_cast<float>(0x00400000U);
  return std::bit_cast<float>(exponent == 255 ? 0x7FC00000U : exponent << 23);
}

// All bf16 in order of their bits or, if `mixed`, in an order that mixes sizes.
std::vector<uint16_t> every_bf16(bool mixed) {
  std::vector<uint16_t> values(kEveryBF16);
  for (size_t i = 0; i < kEveryBF16; ++i) values[i] = static_cast<uint16_t>(mixed ? i * 40503 : i);
  return values;
}

struct Encoded {
  std::vector<std::byte> rows[4];  // in blocks of 32, of 128, with a multiplier for each column, and with one for all
  std::vector<std::byte> columns;
  bool operator==(const Encoded&) const = default;
};

// Cycles through the multipliers in `powers`, block by block.
Encoded encode(const std::vector<uint16_t>& values, const std::vector<uint32_t>& powers, size_t code) {
  const codec::QuantizeKernels& kernels = *codec::active_kernels().quantize;
  std::vector<float> multipliers(values.size());
  for (size_t i = 0; i < multipliers.size(); ++i) multipliers[i] = multiplier_of(powers[i % powers.size()]);
  Encoded encoded;
  const size_t blocks[] = {32, 128, codec::kEach, codec::kWholeRow};
  for (size_t b = 0; b < std::size(blocks); ++b) {
    encoded.rows[b].resize(values.size());
    kernels.encode_by_powers[kBF16][code](values.data(), values.size(), blocks[b], multipliers.data(),
                                          encoded.rows[b].data());
  }
  constexpr size_t kColumns = 1500;  // more than are processed at a time, with an incomplete group at the end
  const size_t rows = values.size() / kColumns;
  encoded.columns.resize(rows * kColumns);
  kernels.encode_columns[kBF16][code](reinterpret_cast<const std::byte*>(values.data()), kColumns * sizeof(uint16_t),
                                      rows, kColumns, multipliers.data(), encoded.columns.data(), kColumns);
  return encoded;
}

void expect_the_references_codes(const std::vector<uint16_t>& values, const std::vector<uint32_t>& powers) {
  for (const size_t code : {kE4M3, kE5M2}) {
    Encoded want;
    {
      const ForcedKernel forced("scalar");
      want = encode(values, powers, code);
    }
    with_every_kernel([&] { EXPECT_TRUE(encode(values, powers, code) == want) << "code " << code; });
  }
}

TEST(PowerCodesTest, EveryBF16TimesEveryPowerIsTheReferencesCode) {
  for (const bool mixed : {false, true}) {
    const std::vector<uint16_t> values = every_bf16(mixed);
    for (uint32_t exponent = 0; exponent <= 255; exponent += mixed ? 5 : 1)
      expect_the_references_codes(values, {exponent});
  }
}

TEST(PowerCodesTest, BlocksOfManyPowersSideBySide) {
  const std::vector<uint16_t> values = every_bf16(true);
  expect_the_references_codes(values, {127, 120, 8, 7, 246, 247, 254, 1, 0, 130, 110});
  expect_the_references_codes(values, {127, 120, 16, 15, 238, 239, 255, 1, 0, 130, 110});
}

// Like weights: normal codes except for a zero here and there, and a group in which one element is not.
TEST(PowerCodesTest, OneElementThatIsDifferentInAGroupOfNormalCodes) {
  constexpr uint16_t kOddOnes[] = {0x0000, 0x8000, 0x0001, 0x3A00, 0x3C7F, 0x43E0,
                                   0x43E8, 0x43E9, 0x7F80, 0xFF80, 0x7FC1};
  for (const uint16_t odd_one : kOddOnes) {
    for (size_t at = 0; at < 256; at += 11) {
      std::vector<uint16_t> values(1500 * 2, 0x3F9A);
      for (size_t i = 0; i < values.size(); i += 3) values[i] = 0xC011;
      values[at] = odd_one;
      expect_the_references_codes(values, {127});
    }
  }
}

}  // namespace
}  // namespace tessera
