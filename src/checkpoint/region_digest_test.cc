#include "checkpoint/region_digest.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "tessera/error.h"

namespace tessera::checkpoint {
namespace {

std::vector<std::byte> numbered(size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(7 * i + i / 256);
  return made;
}

Region rows(Index begin, Index end, Index columns) {
  return Region({IntervalSet(Interval{begin, end}), IntervalSet(Interval{0, columns})});
}

TEST(DigestOfRegion, IsTheTensorsOfTheWhole) {
  const std::vector<std::byte> bytes = numbered(10'000);
  Digest expected{.elements = 2500};
  digest_bytes(expected, 0, bytes.data(), bytes.size());
  EXPECT_EQ(digest_of_region(DType::kF32, {50, 50}, Region::full(Shape{50, 50}), bytes), expected);
}

TEST(DigestOfRegion, AddsUpOverRowsAndColumns) {
  constexpr Index kRows = 6;
  constexpr Index kColumns = 5;
  const std::vector<std::byte> bytes = numbered(kRows * kColumns * 2);
  const Shape shape{kRows, kColumns};
  const Digest whole = digest_of_region(DType::kF16, shape, Region::full(shape), bytes);
  const std::span all(bytes);
  EXPECT_EQ(digest_of_region(DType::kF16, shape, rows(0, 1, kColumns), all.first(10)) +
                digest_of_region(DType::kF16, shape, rows(1, kRows, kColumns), all.subspan(10)),
            whole);
  Digest sum;
  for (Index column = 0; column < kColumns; ++column) {
    std::vector<std::byte> packed;
    for (Index row = 0; row < kRows; ++row)
      for (size_t i = 0; i < 2; ++i) packed.push_back(bytes[static_cast<size_t>(2 * (row * kColumns + column)) + i]);
    const Region region({IntervalSet(Interval{0, kRows}), IntervalSet(Interval{column, column + 1})});
    sum += digest_of_region(DType::kF16, shape, region, packed);
  }
  EXPECT_EQ(sum, whole);
}

TEST(DigestOfRegion, FindsEveryFlippedBit) {
  std::vector<std::byte> bytes = numbered(24);
  const Region region = Region::full(Shape{24});
  const Digest whole = digest_of_region(DType::kU8, {24}, region, bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_NE(digest_of_region(DType::kU8, {24}, region, bytes), whole) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
  }
}

TEST(DigestOfRegion, OfNothingAndOfNoDims) {
  EXPECT_EQ(digest_of_region(DType::kF32, {3, 4}, Region::none(2), {}), Digest{});
  const std::array<std::byte, 4> value{std::byte{1}};
  Digest expected{.elements = 1};
  digest_bytes(expected, 0, value.data(), value.size());
  EXPECT_EQ(digest_of_region(DType::kF32, {}, Region(), value), expected);
}

TEST(DigestOfRegion, RefusesWhatIsOutside) {
  EXPECT_THROW(digest_of_region(DType::kU8, {3}, Region({IntervalSet(Interval{2, 4})}), numbered(2)), Error);
}

}  // namespace
}  // namespace tessera::checkpoint
