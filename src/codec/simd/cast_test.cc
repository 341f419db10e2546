#include "codec/simd/cast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "codec/codec_testing.h"
#include "codec/float/float_oracle.h"
#include "codec/float/unaligned.h"
#include "codec/simd/stream.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E5M2};

size_t bytes(DType dtype) {
  return static_cast<size_t>(bits_of(dtype)) / 8;
}

// The oracle works only with values: what element `i` of a row means, and what a value becomes.
double value_of(DType dtype, const void* row, size_t i) {
  using codec::load_at;
  switch (dtype) {
    case DType::kF64:
      return load_at<double>(row, i);
    case DType::kF32:
      return double{load_at<float>(row, i)};
    case DType::kF16:
      return f16_oracle().decode(load_at<uint16_t>(row, i));
    case DType::kBF16:
      return bf16_oracle().decode(load_at<uint16_t>(row, i));
    case DType::kF8E4M3:
      return e4m3_oracle().decode(load_at<uint8_t>(row, i));
    default:
      return e5m2_oracle().decode(load_at<uint8_t>(row, i));
  }
}

uint64_t code_of(DType dtype, double value) {
  const double x = static_cast<double>(static_cast<float>(value));  // every cast goes through f32
  switch (dtype) {
    case DType::kF64:
      return std::isnan(x) ? 0x7FF8000000000000 : std::bit_cast<uint64_t>(x);
    case DType::kF32:
      return std::isnan(x) ? 0x7FC00000 : std::bit_cast<uint32_t>(static_cast<float>(x));
    case DType::kF16:
      return f16_oracle().encode(x);
    case DType::kBF16:
      return bf16_oracle().encode(x);
    case DType::kF8E4M3:
      return e4m3_oracle().encode(x);
    default:
      return e5m2_oracle().encode(x);
  }
}

uint64_t code_at(const std::byte* row, size_t i, size_t size) {
  uint64_t code = 0;
  std::memcpy(&code, row + i * size, size);
  return code;
}

// f32 bit patterns at which rounding decides: those around every code of every smaller format, and the half-way points.
std::vector<uint32_t> edge_patterns() {
  std::vector<uint32_t> patterns{0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x00000001, 0x00800000, 0x7F7FFFFF};
  for (const FloatOracle* oracle : {&e4m3_oracle(), &e5m2_oracle(), &f16_oracle()}) {
    const size_t stride = oracle == &f16_oracle() ? 61 : 1;
    for (size_t i = 1; i < oracle->values().size(); i += stride) {
      for (const double mark : {oracle->values()[i], (oracle->values()[i - 1] + oracle->values()[i]) / 2}) {
        const auto centre = std::bit_cast<uint32_t>(static_cast<float>(mark));
        for (const uint32_t d : {0U, 1U, ~0U}) patterns.push_back(centre + d);
      }
    }
  }
  for (uint32_t high = 0; high < 0x7F80; high += 7)
    for (const uint32_t low : {0x7FFFU, 0x8000U, 0x8001U}) patterns.push_back(high << 16 | low);
  return patterns;
}

// A row of a type: every code if there are at most 2^16, otherwise edges of both signs and random bits.
std::vector<std::byte> inputs_of(DType dtype) {
  std::vector<std::byte> row;
  const auto append = [&row](auto value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    row.insert(row.end(), p, p + sizeof(value));
  };
  if (bytes(dtype) <= 2) {
    for (uint32_t code = 0; code < 1U << bits_of(dtype); ++code)
      bytes(dtype) == 1 ? append(static_cast<uint8_t>(code)) : append(static_cast<uint16_t>(code));
    return row;
  }
  const bool wide = dtype == DType::kF64;
  for (const uint32_t pattern : edge_patterns()) {
    for (const float x : {std::bit_cast<float>(pattern), -std::bit_cast<float>(pattern)}) {
      if (!wide) {
        append(x);
        continue;
      }
      // f64 values next to an f32: the cast must not skip rounding to f32 first.
      const auto code = std::bit_cast<uint64_t>(static_cast<double>(x));
      for (const uint64_t d : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) append(code + d);
    }
  }
  const auto random = random_bytes(size_t{1} << 16, 11);
  row.insert(row.end(), random.begin(), random.end());
  if (wide) {
    std::mt19937_64 draw(3);
    std::uniform_real_distribution<double> exponent(-160, 140);
    for (int i = 0; i < 5000; ++i) append(std::exp2(exponent(draw)));
    append(std::numeric_limits<double>::max());
    append(std::numeric_limits<double>::denorm_min());
  }
  return row;
}

class CastTest : public EveryKernelTest {};

TEST_P(CastTest, EveryPairGivesTheNearestValue) {
  for (const DType from : kFloats) {
    const std::vector<std::byte> src = inputs_of(from);
    const size_t n = src.size() / bytes(from);
    for (const DType to : kFloats) {
      if (from == to) continue;
      std::vector<std::byte> dst(n * bytes(to));
      cast_row(from, to)(src.data(), dst.data(), n);
      std::vector<std::byte> streamed(n * bytes(to));
      cast_row_stream(from, to)(src.data(), streamed.data(), n);
      stream_fence();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(code_at(dst.data(), i, bytes(to)), code_of(to, value_of(from, src.data(), i)))
            << to_string(from) << " to " << to_string(to) << ", element " << i << ", value "
            << value_of(from, src.data(), i);
      }
      ASSERT_EQ(dst, streamed) << to_string(from) << " to " << to_string(to);
    }
  }
}

// The widest vectors have 16 lanes, and one step takes two of them.
TEST_P(CastTest, EveryTailAtEveryAlignmentTouchesItsBytesAlone) {
  const auto random = random_bytes(1 << 14, 5);
  std::vector<size_t> lengths(2 * 2 * 16 + 4);
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = n;
  lengths.insert(lengths.end(), {500, 1031});
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      if (from == to) continue;
      std::vector<std::byte> expected(1031 * bytes(to));
      {
        const ForcedKernel scalar("scalar");
        cast_row(from, to)(random.data(), expected.data(), 1031);
      }
      for (const CastRow cast : {cast_row(from, to), cast_row_stream(from, to)}) {
        for (const size_t n : lengths) {
          const size_t off = n % 2 == 0 ? n % 64 : 1;
          GuardedBytes src(n * bytes(from), 3 * n % 7);
          GuardedBytes dst(n * bytes(to), off);
          std::copy_n(random.data(), src.size(), src.data());
          cast(src.data(), dst.data(), n);
          stream_fence();
          ASSERT_TRUE(std::equal(dst.data(), dst.data() + dst.size(), expected.data()))
              << to_string(from) << " to " << to_string(to) << ", " << n << " elements";
          ASSERT_TRUE(dst.intact()) << to_string(from) << " to " << to_string(to) << ", " << n << " elements";
        }
      }
    }
  }
}

TEST_P(CastTest, WithinADTypeBitsMoveUntouched) {
  const auto random = random_bytes(8 * 1000, 9);
  for (const DType dtype : all_dtypes()) {
    const auto size = static_cast<size_t>(bytes_of(dtype, 1000));
    for (const CastRow copy : {cast_row(dtype, dtype), cast_row_stream(dtype, dtype)}) {
      GuardedBytes dst(size, 5);
      copy(random.data(), dst.data(), 1000);
      stream_fence();
      EXPECT_TRUE(std::equal(dst.data(), dst.data() + size, random.data())) << to_string(dtype);
      EXPECT_TRUE(dst.intact()) << to_string(dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CastTest, every_kernel(), kernel_name);

TEST(CastLookupTest, OtherPairsAreRefusedByName) {
  EXPECT_FALSE(castable(DType::kI32, DType::kF32));
  EXPECT_FALSE(castable(DType::kF32, DType::kF8E8M0));
  EXPECT_FALSE(castable(DType::kF4, DType::kF32));
  EXPECT_TRUE(castable(DType::kBool, DType::kBool));
  try {
    cast_row(DType::kI32, DType::kBF16);
    FAIL() << "an integer was cast";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), testing::HasSubstr("i32 to bf16"));
  }
  EXPECT_THROW(cast_row_stream(DType::kC64, DType::kF32), Error);
}

}  // namespace
}  // namespace tessera
