#include "codec/simd/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "base/testing.h"
#include "codec/codec_testing.h"
#include "codec/float/float_oracle.h"
#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/reduce.h"

namespace tessera {
namespace {

using testing::HasSubstr;

// Every class of value: zeros, subnormals, the smallest and largest, infinities, NaNs, and any bits.
std::vector<float> values_of_all_classes(size_t n, uint64_t seed) {
  using Limits = std::numeric_limits<float>;
  const float special[] = {0.0F,
                           -0.0F,
                           Limits::denorm_min(),
                           -Limits::denorm_min(),
                           1e-40F,
                           Limits::min(),
                           -Limits::min(),
                           Limits::max(),
                           Limits::lowest(),
                           1.0F,
                           -1.5F,
                           Limits::infinity()};
  std::mt19937_64 random(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    const uint64_t drawn = random();
    value = drawn % 4 == 0 ? special[drawn / 4 % std::size(special)]
                           : std::bit_cast<float>(static_cast<uint32_t>(drawn >> 32));
  }
  return values;
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

class FoldKernel : public testing::TestWithParam<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(All, FoldKernel, testing::ValuesIn(available_kernels()),
                         [](const auto& test) { return std::string(test.param); });

// Term t of a fold of n elements.
std::vector<float> term_of(size_t n, size_t t) {
  return values_of_all_classes(n, 7 + n + 1000 * t);
}

// The terms one by one, long-hand.
std::vector<float> folded_by_hand(std::vector<float> acc, size_t terms, float scale, bool first) {
  for (size_t t = 0; t < terms; ++t) {
    const std::vector<float> term = term_of(acc.size(), t);
    for (size_t i = 0; i < acc.size(); ++i) {
      const volatile float product = term[i] * scale;  // volatile: never fused
      acc[i] = first && t == 0 ? product : acc[i] + product;
    }
  }
  return acc;
}

TEST_P(FoldKernel, AddsTheRoundedProductsInOrder) {
  const ForcedKernel forced(GetParam());
  for (const size_t n : {0U, 1U, 3U, 7U, 8U, 9U, 31U, 64U, 65U, 127U, 1000U})
    for (const size_t count : {1U, 2U, 3U, 8U})
      for (const float scale : {1.0F, 0.5F, 1.0F / 3, 1e-20F})
        for (const bool first : {false, true}) {
          const std::vector<float> acc = values_of_all_classes(n, 99 + n);
          std::vector<GuardedBytes> in;
          std::vector<const std::byte*> terms;
          for (size_t t = 0; t < count; ++t) {
            in.emplace_back(n * sizeof(float), (n + t) % 5);
            const std::vector<float> term = term_of(n, t);
            std::ranges::copy(std::as_bytes(std::span(term)), in.back().data());
          }
          for (GuardedBytes& term : in) terms.push_back(term.data());
          GuardedBytes out(n * sizeof(float), n % 3);
          std::ranges::copy(std::as_bytes(std::span(acc)), out.data());
          fold_row(DType::kF32, DType::kF32, first)(terms.data(), count, scale, out.data(), n);
          const std::vector<float> expected = folded_by_hand(acc, count, scale, first);
          for (size_t i = 0; i < n; ++i)
            ASSERT_EQ(codec::load_at<uint32_t>(out.data(), i), codec::F32::encode(expected[i]))
                << i << " of " << n << ", " << count << " terms by " << scale;
          EXPECT_TRUE(out.intact());
        }
}

TEST_P(FoldKernel, WidensHalvesExactly) {
  const ForcedKernel forced(GetParam());
  constexpr size_t kCodes = 1 << 16;
  std::vector<uint16_t> codes(kCodes);
  for (size_t i = 0; i < kCodes; ++i) codes[i] = static_cast<uint16_t>(i);
  const auto* const term = reinterpret_cast<const std::byte*>(codes.data());
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<float> acc(kCodes, 3.0F);
    fold_row(dtype, DType::kF32, false)(&term, 1, 0.5F, acc.data(), kCodes);
    for (size_t i = 0; i < kCodes; ++i) {
      const auto value =
          static_cast<float>((dtype == DType::kF16 ? f16_oracle() : bf16_oracle()).decode(static_cast<uint32_t>(i)));
      ASSERT_TRUE(same(acc[i], 3.0F + value * 0.5F)) << to_string(dtype) << " " << i;
    }
  }
}

TEST_P(FoldKernel, RoundsOnce) {
  const ForcedKernel forced(GetParam());
  constexpr size_t kElements = 1003;
  std::vector<std::vector<float>> values;
  std::vector<const std::byte*> terms;
  for (size_t t = 0; t < 3; ++t) values.push_back(term_of(kElements, t));
  for (const auto& term : values) terms.push_back(reinterpret_cast<const std::byte*>(term.data()));
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> acc(kElements), expected(kElements);
    std::vector<float> wide(kElements);
    for (size_t i = 0; i < kElements; ++i) acc[i] = static_cast<uint16_t>(i * 61);
    accumulate_row(ReduceOp::kSum, dtype, true)(acc.data(), wide.data(), kElements);
    finish_row(ReduceOp::kSum, dtype)(folded_by_hand(wide, 3, 0.25F, false).data(), expected.data(), kElements, 1);
    fold_row(DType::kF32, dtype, false)(terms.data(), 3, 0.25F, acc.data(), kElements);
    EXPECT_EQ(acc, expected) << to_string(dtype);
  }
}

TEST(Fold, TakesOnlyGradients) {
  EXPECT_FALSE(foldable(DType::kF64));
  EXPECT_THAT(error_of([] { fold_row(DType::kI32, DType::kF32, false); }), HasSubstr("cannot fold gradients of i32"));
}

}  // namespace
}  // namespace tessera
