#include "codec/simd/fold.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "base/testing.h"
#include "codec/codec_testing.h"
#include "codec/float/float_oracle.h"
#include "codec/float/unaligned.h"

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

TEST_P(FoldKernel, AddsTheRoundedProduct) {
  const ForcedKernel forced(GetParam());
  for (const size_t n : {0U, 1U, 3U, 7U, 8U, 9U, 31U, 64U, 1000U}) {
    for (const float scale : {1.0F, 0.5F, 0.25F, 1.0F / 3, 1e-20F}) {
      const std::vector<float> src = values_of_all_classes(n, 7 + n);
      std::vector<float> acc = values_of_all_classes(n, 99 + n);
      GuardedBytes in(n * sizeof(float), n % 5);
      GuardedBytes out(n * sizeof(float), n % 3);
      std::memcpy(in.data(), src.data(), n * sizeof(float));
      std::memcpy(out.data(), acc.data(), n * sizeof(float));
      fold_row(DType::kF32, false)(in.data(), scale, out.data(), n);
      for (size_t i = 0; i < n; ++i) {
        const volatile float product = src[i] * scale;  // volatile: never fused
        const float expected = acc[i] + product;
        ASSERT_TRUE(same(codec::load_at<float>(out.data(), i), expected)) << i << " of " << n << " by " << scale;
      }
      fold_row(DType::kF32, true)(in.data(), scale, out.data(), n);
      for (size_t i = 0; i < n; ++i) ASSERT_TRUE(same(codec::load_at<float>(out.data(), i), src[i] * scale));
      EXPECT_TRUE(in.intact() && out.intact());
    }
  }
}

TEST_P(FoldKernel, WidensHalvesExactly) {
  const ForcedKernel forced(GetParam());
  constexpr size_t kCodes = 1 << 16;
  std::vector<uint16_t> codes(kCodes);
  for (size_t i = 0; i < kCodes; ++i) codes[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<float> acc(kCodes, 3.0F);
    fold_row(dtype, false)(codes.data(), 0.5F, acc.data(), kCodes);
    for (size_t i = 0; i < kCodes; ++i) {
      const auto value =
          static_cast<float>((dtype == DType::kF16 ? f16_oracle() : bf16_oracle()).decode(static_cast<uint32_t>(i)));
      ASSERT_TRUE(same(acc[i], 3.0F + value * 0.5F)) << to_string(dtype) << " " << i;
    }
  }
}

TEST(Fold, TakesOnlyGradients) {
  EXPECT_FALSE(foldable(DType::kF64));
  EXPECT_THAT(error_of([] { fold_row(DType::kI32, false); }), HasSubstr("cannot fold gradients of i32"));
}

}  // namespace
}  // namespace tessera
