#include "codec/simd/reduce.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <limits>

#include "codec/codec_testing.h"
#include "codec/float/float_bits.h"
#include "codec/float/float_oracle.h"
#include "codec/float/unaligned.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

using Row = std::vector<std::byte>;

template <typename T>
Row row_of(const std::vector<T>& values) {
  const auto* p = reinterpret_cast<const std::byte*>(values.data());
  return Row(p, p + values.size() * sizeof(T));
}

// Reduces the sources in order, with any alignment of source and accumulator.
Row reduce(ReduceOp op, DType dtype, const std::vector<Row>& sources, size_t n, size_t misalignment = 0) {
  GuardedBytes acc(static_cast<size_t>(bytes_of(accumulator_of(dtype), static_cast<int64_t>(n))), misalignment);
  for (size_t s = 0; s < sources.size(); ++s) {
    GuardedBytes src(sources[s].size(), misalignment * 3 % 7);
    std::copy(sources[s].begin(), sources[s].end(), src.data());
    accumulate_row(op, dtype, s == 0)(src.data(), acc.data(), n);
  }
  GuardedBytes dst(static_cast<size_t>(bytes_of(dtype, static_cast<int64_t>(n))), misalignment * 5 % 9);
  finish_row(op, dtype)(acc.data(), dst.data(), n, static_cast<int>(sources.size()));
  EXPECT_TRUE(acc.intact() && dst.intact()) << to_string(op) << " of " << to_string(dtype);
  return Row(dst.data(), dst.data() + dst.size());
}

template <typename T>
std::vector<T> reduce_values(ReduceOp op, DType dtype, const std::vector<std::vector<T>>& sources) {
  std::vector<Row> rows;
  for (const auto& source : sources) rows.push_back(row_of(source));
  const Row result = reduce(op, dtype, rows, sources[0].size());
  std::vector<T> values(sources[0].size());
  std::memcpy(values.data(), result.data(), result.size());
  return values;
}

template <typename A>
A naive_step(ReduceOp op, A acc, A x) {
  if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return acc + x;
  if (op == ReduceOp::kProduct) return acc * x;
  if (std::isnan(acc)) return acc;
  if (std::isnan(x)) return x;
  const bool replaces = op == ReduceOp::kMin ? x < acc : acc < x;
  return replaces ? x : acc;
}

// For every float dtype: computes with values, in the accumulator's type.
template <typename A>
A naive(ReduceOp op, const std::vector<A>& terms) {
  A acc = terms[0];
  for (size_t i = 1; i < terms.size(); ++i) acc = naive_step(op, acc, terms[i]);
  return op == ReduceOp::kAvg ? acc / static_cast<A>(terms.size()) : acc;
}

template <typename A>
uint64_t naive_code(DType dtype, ReduceOp op, const std::vector<Row>& sources, size_t i) {
  std::vector<A> terms;
  for (const Row& row : sources) {
    switch (dtype) {
      case DType::kF64:
        terms.push_back(static_cast<A>(codec::load_at<double>(row.data(), i)));
        break;
      case DType::kF32:
        terms.push_back(codec::load_at<float>(row.data(), i));
        break;
      case DType::kF16:
        terms.push_back(static_cast<A>(f16_oracle().decode(codec::load_at<uint16_t>(row.data(), i))));
        break;
      default:
        terms.push_back(static_cast<A>(bf16_oracle().decode(codec::load_at<uint16_t>(row.data(), i))));
    }
  }
  const A result = naive(op, terms);
  switch (dtype) {
    case DType::kF64:
      return std::isnan(result) ? kNaNF64 : std::bit_cast<uint64_t>(static_cast<double>(result));
    case DType::kF32:
      return std::isnan(result) ? kNaNF32 : std::bit_cast<uint32_t>(static_cast<float>(result));
    case DType::kF16:
      return f16_oracle().encode(static_cast<double>(result));
    default:
      return bf16_oracle().encode(static_cast<double>(result));
  }
}

class ReduceTest : public EveryKernelTest {};

TEST_P(ReduceTest, FloatsOfEveryTypeAndTailEqualTheNaiveReduction) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const auto size = static_cast<size_t>(bytes_of(dtype, 1));
    for (size_t n = 0; n <= 36; ++n) {
      std::vector<Row> sources;
      for (uint32_t s = 0; s < 5; ++s) sources.push_back(random_bytes(n * size, 100 * s + static_cast<uint32_t>(n)));
      for (const ReduceOp op : kOps) {
        const Row result = reduce(op, dtype, sources, n, n % 8);
        for (size_t i = 0; i < n; ++i) {
          uint64_t code = 0;
          std::memcpy(&code, result.data() + i * size, size);
          const uint64_t expected = dtype == DType::kF64 ? naive_code<double>(dtype, op, sources, i)
                                                         : naive_code<float>(dtype, op, sources, i);
          ASSERT_EQ(code, expected) << to_string(op) << " of " << to_string(dtype) << ", element " << i << " of " << n;
        }
      }
    }
  }
}

TEST_P(ReduceTest, SumsRunInTheOrderOfTheSourcesAndRoundOnce) {
  const auto sum = [](std::vector<std::vector<float>> sources) {
    return reduce_values(ReduceOp::kSum, DType::kF32, sources)[0];
  };
  EXPECT_EQ(sum({{1e8F}, {3.0F}, {3.0F}}), 1e8F) << "each 3 on its own is lost beside 1e8";
  EXPECT_EQ(sum({{3.0F}, {3.0F}, {1e8F}}), 100'000'008.0F);

  // 256 + 1 + 1 in bf16 is 258; rounding after each step would stay at 256.
  const std::vector<uint16_t> bf16 = reduce_values<uint16_t>(
      ReduceOp::kSum, DType::kBF16, {{bf16_from_f32(256)}, {bf16_from_f32(1)}, {bf16_from_f32(1)}});
  EXPECT_EQ(f32_from_bf16(bf16[0]), 258);
}

TEST_P(ReduceTest, AverageDividesLast) {
  // Dividing each term first would give 3 * fl(1/3 of the smallest number) = 0.
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(reduce_values<float>(ReduceOp::kAvg, DType::kF32, {{tiny}, {tiny}, {tiny}})[0], tiny);
  const std::vector<uint16_t> f16 =
      reduce_values<uint16_t>(ReduceOp::kAvg, DType::kF16, {{f16_from_f32(60'000)}, {f16_from_f32(60'000)}});
  EXPECT_EQ(f32_from_f16(f16[0]), 60'000) << "the sum exceeds f16, the average does not";
}

TEST_P(ReduceTest, MinAndMaxPropagateNaNAndKeepTheEarlierOfEqualOnes) {
  const float nan = std::bit_cast<float>(0xFFC12345U);
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto result =
        reduce_values<float>(op, DType::kF32, {{nan, 1, -0.0F, 0.0F}, {1, nan, 0.0F, -0.0F}, {2, 2, 0, 0}});
    EXPECT_EQ(std::bit_cast<uint32_t>(result[0]), kNaNF32);
    EXPECT_EQ(std::bit_cast<uint32_t>(result[1]), kNaNF32);
    EXPECT_TRUE(std::signbit(result[2]));
    EXPECT_FALSE(std::signbit(result[3]));
  }
}

TEST_P(ReduceTest, OneSourceComesOutAsItWentIn) {
  const std::vector<uint16_t> codes = {0x0001, 0x8000, 0x3C00, 0x7BFF, 0xFC00, 0x7C00};
  for (const ReduceOp op : kOps) EXPECT_EQ(reduce_values<uint16_t>(op, DType::kF16, {codes}), codes);
}

INSTANTIATE_TEST_SUITE_P(Kernels, ReduceTest, every_kernel(), kernel_name);

template <typename T>
void expect_integers_wrap(DType dtype) {
  const std::vector<T> a = {std::numeric_limits<T>::max(), std::numeric_limits<T>::min(), 100, 3};
  const std::vector<T> b = {1, std::numeric_limits<T>::max(), 100, 5};
  using U = std::make_unsigned_t<T>;
  const auto sums = reduce_values<T>(ReduceOp::kSum, dtype, {a, b});
  const auto products = reduce_values<T>(ReduceOp::kProduct, dtype, {a, b});
  const auto minima = reduce_values<T>(ReduceOp::kMin, dtype, {a, b});
  const auto maxima = reduce_values<T>(ReduceOp::kMax, dtype, {a, b});
  for (size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<unsigned __int128>(static_cast<U>(a[i]));
    const auto y = static_cast<unsigned __int128>(static_cast<U>(b[i]));
    EXPECT_EQ(sums[i], static_cast<T>(static_cast<U>(x + y))) << to_string(dtype) << " element " << i;
    EXPECT_EQ(products[i], static_cast<T>(static_cast<U>(x * y))) << to_string(dtype) << " element " << i;
    EXPECT_EQ(minima[i], std::min(a[i], b[i])) << to_string(dtype) << " element " << i;
    EXPECT_EQ(maxima[i], std::max(a[i], b[i])) << to_string(dtype) << " element " << i;
  }
}

TEST(ReduceIntegersTest, WrapInTheirOwnType) {
  expect_integers_wrap<int64_t>(DType::kI64);
  expect_integers_wrap<int32_t>(DType::kI32);
  expect_integers_wrap<int16_t>(DType::kI16);
  expect_integers_wrap<int8_t>(DType::kI8);
  expect_integers_wrap<uint64_t>(DType::kU64);
  expect_integers_wrap<uint32_t>(DType::kU32);
  expect_integers_wrap<uint16_t>(DType::kU16);
  expect_integers_wrap<uint8_t>(DType::kU8);
}

TEST(ReduceComplexTest, SumsAveragesAndMultipliesComplexNumbers) {
  using C = std::complex<float>;
  const std::vector<std::vector<C>> sources = {{{1, 2}, {0, 1}}, {{3, -1}, {0, 1}}, {{2, 5}, {0, 1}}};
  EXPECT_EQ(reduce_values(ReduceOp::kSum, DType::kC64, sources), (std::vector<C>{{6, 6}, {0, 3}}));
  EXPECT_EQ(reduce_values(ReduceOp::kAvg, DType::kC64, sources), (std::vector<C>{{2, 2}, {0, 1}}));
  EXPECT_EQ(reduce_values(ReduceOp::kProduct, DType::kC64, sources), (std::vector<C>{{-15, 35}, {0, -1}}));
}

TEST(ReduceLookupTest, WhatCannotBeReducedIsRefusedByName) {
  EXPECT_FALSE(reducible(ReduceOp::kAvg, DType::kI32));
  EXPECT_FALSE(reducible(ReduceOp::kMax, DType::kC64));
  EXPECT_FALSE(reducible(ReduceOp::kSum, DType::kBool));
  EXPECT_FALSE(reducible(ReduceOp::kSum, DType::kF8E4M3));
  EXPECT_TRUE(reducible(ReduceOp::kMax, DType::kU8));
  EXPECT_EQ(accumulator_of(DType::kBF16), DType::kF32);
  EXPECT_EQ(accumulator_of(DType::kF64), DType::kF64);
  EXPECT_EQ(accumulator_of(DType::kI8), DType::kI8);
  EXPECT_EQ(accumulator_of(DType::kC64), DType::kC64);
  EXPECT_THROW(accumulator_of(DType::kBool), Error);
  try {
    accumulate_row(ReduceOp::kAvg, DType::kI32, true);
    FAIL() << "an average of integers was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("i32 by avg"));
  }
  EXPECT_THROW(finish_row(ReduceOp::kMin, DType::kC64), Error);
}

}  // namespace
}  // namespace tessera
