#include "codec/simd/squares.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "codec/codec_testing.h"
#include "codec/float/float_bits.h"
#include "tessera/error.h"

namespace tessera {
namespace {

class SquaresTest : public EveryKernelTest {};

double value_of(DType dtype, const std::byte* p) {
  const auto read = [p](auto bits) {
    std::memcpy(&bits, p, sizeof(bits));
    return bits;
  };
  switch (dtype) {
    case DType::kF64:
      return read(double{});
    case DType::kF32:
      return double{read(float{})};
    case DType::kF16:
      return double{f32_from_f16(read(uint16_t{}))};
    default:
      return double{f32_from_bf16(read(uint16_t{}))};
  }
}

// The order that the header gives, a lane after the other.
double by_lanes(DType dtype, const std::byte* values, size_t n) {
  double sum = 0;
  for (size_t lane = 0; lane < 8; ++lane) {
    double of_lane = 0;
    for (size_t i = lane; i < n; i += 8) {
      const double value = value_of(dtype, values + bytes_of(dtype, static_cast<int64_t>(i)));
      volatile double square = value * value;  // rounded before it is added
      of_lane += square;
    }
    sum += of_lane;
  }
  return sum;
}

TEST_P(SquaresTest, AreThoseOfTheOrderBitByBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (size_t n = 0; n < 200; ++n) {
      GuardedBytes values(static_cast<size_t>(bytes_of(dtype, static_cast<int64_t>(n))), n % 5);
      const std::vector<std::byte> random = random_bytes(values.size(), static_cast<uint32_t>(n));
      std::copy_n(random.data(), random.size(), values.data());
      const double expected = by_lanes(dtype, values.data(), n);
      const double found = sum_of_squares(dtype, values.data(), n);
      if (std::isnan(expected)) {  // random bits of a small type have NaNs
        ASSERT_TRUE(std::isnan(found)) << to_string(dtype) << " x " << n;
      } else {
        ASSERT_EQ(std::bit_cast<uint64_t>(found), std::bit_cast<uint64_t>(expected)) << to_string(dtype) << " x " << n;
      }
    }
  }
}

TEST_P(SquaresTest, AreThoseOfTheOrderBitByBitOfFiniteValues) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  for (const size_t n : {1, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 4099}) {
    std::vector<float> wide(n);
    std::vector<uint16_t> half(n);
    std::vector<uint16_t> brain(n);
    for (size_t i = 0; i < n; ++i) {
      wide[i] = normal(random);
      half[i] = f16_from_f32(wide[i]);
      brain[i] = bf16_from_f32(wide[i]);
    }
    const auto check = [n](DType dtype, const auto& values) {
      const auto* data = reinterpret_cast<const std::byte*>(values.data());
      EXPECT_EQ(sum_of_squares(dtype, data, n), by_lanes(dtype, data, n)) << to_string(dtype) << " x " << n;
    };
    check(DType::kF32, wide);
    check(DType::kF16, half);
    check(DType::kBF16, brain);
  }
}

TEST_P(SquaresTest, KeepWhatIsNotFinite) {
  std::vector<float> values(50, 1);
  const auto sum = [&] {
    return sum_of_squares(DType::kF32, reinterpret_cast<const std::byte*>(values.data()), values.size());
  };
  EXPECT_EQ(sum(), 50);
  for (const size_t place : {0, 20, 49}) {
    values.assign(50, 1);
    values[place] = -std::numeric_limits<float>::infinity();
    EXPECT_EQ(sum(), std::numeric_limits<double>::infinity());
    values[(place + 1) % 50] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(sum()));
  }
}

TEST(Squares, OfOtherTypesAreRefused) {
  EXPECT_FALSE(sums_squares(DType::kF8E4M3));
  EXPECT_THROW(sum_of_squares(DType::kF8E4M3, nullptr, 0), Error);
}

INSTANTIATE_TEST_SUITE_P(Kernels, SquaresTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
