#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "tessera/checkpoint.h"

namespace tessera {
namespace {

TEST(FirstDifference, EqualTensorsHaveNone) {
  const std::array<float, 4> values{1, 2, 3, 4};
  const auto bytes = std::as_bytes(std::span(values));
  EXPECT_EQ(first_difference(DType::kF32, Region::full(Shape{2, 2}), bytes, bytes), std::nullopt);
  EXPECT_EQ(first_difference(DType::kF32, Region::none(2), {}, {}), std::nullopt);
}

TEST(FirstDifference, NamesTheGlobalIndexAndBothValues) {
  const Region region({IntervalSet(Interval{10, 12}), IntervalSet::of_sorted(std::vector<Interval>{{0, 1}, {7, 9}})});
  const std::array<float, 6> expected{0, 1, 2, 3, 4, 5};
  std::array<float, 6> actual = expected;
  actual[4] = 0.25F;
  actual[5] = -5;
  const auto difference =
      first_difference(DType::kF32, region, std::as_bytes(std::span(expected)), std::as_bytes(std::span(actual)));
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->index, (std::vector<Index>{11, 7}));
  EXPECT_EQ(difference->to_string(), "[11,7] is 0.25 (0x3e800000), expected 4 (0x40800000); 2 elements differ");
}

TEST(FirstDifference, ComparesBitsNotValues) {
  const float plus = 0;
  const float minus = -0.0F;
  const auto difference =
      first_difference(DType::kF32, Region(), std::as_bytes(std::span(&plus, 1)), std::as_bytes(std::span(&minus, 1)));
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->to_string(), "[] is -0 (0x80000000), expected 0 (0x00000000); 1 element differs");
}

TEST(FirstDifference, FindsANibble) {
  const std::array<uint8_t, 2> expected{0x10, 0x32};
  const std::array<uint8_t, 2> actual{0x10, 0xA2};
  const auto difference = first_difference(DType::kF4, Region::full(Shape{4}), std::as_bytes(std::span(expected)),
                                           std::as_bytes(std::span(actual)));
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->to_string(), "[3] is -1 (0xa), expected 1.5 (0x3); 1 element differs");
}

TEST(ElementToString, ShowsEveryDtypeAsPeopleReadIt) {
  struct Case {
    DType dtype;
    uint64_t bits;
    const char* text;
  };
  const Case cases[] = {
      {DType::kF64, 0x3FE0000000000000, "0.5 (0x3fe0000000000000)"},
      {DType::kF32, 0x7FC00000, "nan (0x7fc00000)"},
      {DType::kF16, 0xC000, "-2 (0xc000)"},
      {DType::kBF16, 0x3F80, "1 (0x3f80)"},
      {DType::kF8E4M3, 0x7E, "448 (0x7e)"},
      {DType::kF8E5M2, 0x7C, "inf (0x7c)"},
      {DType::kF8E8M0, 0x80, "2^1 (0x80)"},
      {DType::kF8E8M0, 0xFF, "nan (0xff)"},
      {DType::kF4, 0x0F, "-6 (0xf)"},
      {DType::kI64, ~0ULL, "-1"},
      {DType::kI32, 0x80000000, "-2147483648"},
      {DType::kI16, 0xFFFF, "-1"},
      {DType::kI8, 0x80, "-128"},
      {DType::kU64, ~0ULL, "18446744073709551615"},
      {DType::kU32, 0xFFFFFFFF, "4294967295"},
      {DType::kU16, 0xFFFF, "65535"},
      {DType::kU8, 0xFF, "255"},
      {DType::kBool, 1, "true"},
      {DType::kBool, 0, "false"},
      {DType::kBool, 2, "0x02"},
      {DType::kC64, 0xBF8000003F000000, "0.5-1i (0xbf8000003f000000)"},
  };
  for (const Case& c : cases)
    EXPECT_EQ(element_to_string(c.dtype, reinterpret_cast<const std::byte*>(&c.bits), 0), c.text) << to_string(c.dtype);
}

}  // namespace
}  // namespace tessera
