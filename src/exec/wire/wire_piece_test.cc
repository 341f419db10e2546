#include "exec/wire/wire_piece.h"

#include <gtest/gtest.h>

#include "exec/wire/wire_testing.h"

namespace tessera {
namespace {

using exec_testing::every_wire_format;
using exec_testing::for_each_element;
using exec_testing::pick;
using exec_testing::Random;
using exec_testing::random_regions;

Shape random_wire_shape(Random& random) {
  Shape shape;
  for (Index d = pick(random, 0, 2); d > 0; --d) shape.push_back(pick(random, 1, 3));
  shape.push_back(pick(random, 1, 60));
  shape.push_back(2 * pick(random, 1, 40));
  return shape;
}

WireRegion random_wire_region(Random& random, const codec::BlockFormat& format) {
  WireRegion what{.format = format, .shape = random_wire_shape(random)};
  const std::vector<Region> regions = random_regions(random, what.shape);
  what.region = regions[static_cast<size_t>(pick(random, 0, static_cast<Index>(regions.size()) - 1))];
  what.fused = pick(random, 0, 1) != 0;
  if (what.fused) {
    what.row0 = pick(random, 0, 200);
    what.column0 = pick(random, 0, 200);
  }
  return what;
}

TEST(WirePiece, BoxesOfAnyRangesOfBandsCoverTheRegionOnceAndLieInTheirBlocks) {
  Random random(61);
  for (int i = 0; i < 40; ++i) {
    for (const codec::BlockFormat& format : every_wire_format()) {
      const WireRegion what = random_wire_region(random, format);
      const WirePiece piece(what);
      const BlockWalk& walk = piece.walk();
      ASSERT_EQ(walk.elements(), what.region.size());
      const BoxOffsets places(what, Region::full(what.shape), element_strides(what.shape));
      std::vector<int> times(static_cast<size_t>(element_count(what.shape)));
      for (Index band = 0; band < walk.all_bands();) {
        const Index end = std::min(walk.all_bands(), band + pick(random, 1, 9));
        walk.for_each_box(band, end, [&](const BlockBox& box) {
          const Index rows = box.rows.begin + what.row0;
          ASSERT_EQ(walk.block_rows().position_of(rows / format.block_rows), box.block_row);
          ASSERT_EQ(walk.block_columns().position_of((box.columns.begin + what.column0) / format.block_columns),
                    box.block_column);
          for (Index r = 0; r < box.rows.size(); ++r)
            for (Index c = 0; c < box.columns.size(); ++c)
              ++times[static_cast<size_t>(places.of(box) + r * places.row_stride() + c)];
        });
        band = end;
      }
      size_t inside = 0;
      const std::vector<Index> strides = element_strides(what.shape);
      for_each_element(what.region, [&](const std::vector<Index>& at) {
        Index place = 0;
        for (size_t d = 0; d < at.size(); ++d) place += at[d] * strides[d];
        ASSERT_EQ(times[static_cast<size_t>(place)], 1);
        ++inside;
      });
      ASSERT_EQ(static_cast<size_t>(std::count(times.begin(), times.end(), 0)), times.size() - inside);
    }
  }
}

TEST(WirePiece, ItsSectionsFollowOneAnotherAndItsCodesFillTheLast) {
  Random random(62);
  for (int i = 0; i < 40; ++i) {
    for (const codec::BlockFormat& format : every_wire_format()) {
      const WireRegion what = random_wire_region(random, format);
      const WirePiece piece(what);
      if (what.region.empty()) {
        ASSERT_EQ(piece.bytes(), 0);
        continue;
      }
      const BlockWalk& walk = piece.walk();
      std::vector<int> uses(static_cast<size_t>(piece.bytes()));
      const auto use = [&](int64_t first, int64_t bytes) {
        for (int64_t b = first; b < first + bytes; ++b) ++uses.at(static_cast<size_t>(b));
      };
      if (needs_amax(format.spec.format)) use(piece.amax(0), walk.matrices() * 4);
      use(piece.scale(0, 0, 0), walk.matrices() * walk.blocks() * format.scale_bytes());
      EXPECT_EQ(piece.scale(0, 0, 0) % 16, 0);
      EXPECT_EQ(piece.code_section() % 16, 0);
      EXPECT_LE(std::count(uses.begin(), uses.begin() + piece.code_section(), 0), 30);
      walk.for_each_box(0, walk.all_bands(), [&](const BlockBox& box) {
        for (Index r = 0; r < box.rows.size(); ++r)
          use(piece.codes(box) + r * piece.row_bytes(), piece.box_row_bytes(box));
      });
      EXPECT_EQ(std::count(uses.begin() + piece.code_section(), uses.end(), 1),
                static_cast<std::ptrdiff_t>(uses.size()) - piece.code_section());
    }
  }
}

TEST(WirePiece, IsAboutAsLargeAsItsFormatSays) {
  for (const codec::BlockFormat& format : every_wire_format()) {
    const Shape shape{3, 1024, 2048};
    const WirePiece piece({.format = format, .shape = shape, .region = Region::full(shape)});
    const int64_t bits = element_count(shape) / 256 * format.bits_of_256();
    EXPECT_NEAR(static_cast<double>(piece.bytes()), static_cast<double>(bits) / 8,
                static_cast<double>(bits) / 8 * 1e-3);
  }
}

TEST(WirePiece, RefusesWhatIsNoMatrixOfFloatsAndWhatCannotBePacked) {
  const auto piece = [](Format format, DType dtype, const Shape& shape) {
    return WirePiece(
        {.format = codec::BlockFormat(format), .src_dtype = dtype, .shape = shape, .region = Region::full(shape)});
  };
  EXPECT_THROW(piece(Format::kMxfp8, DType::kF32, {64}), Error);
  EXPECT_THROW(piece(Format::kMxfp8, DType::kI32, {64, 64}), Error);
  EXPECT_THROW(piece(Format::kNvfp4, DType::kF32, {64, 63}), Error);
  EXPECT_EQ(piece(Format::kMxfp8, DType::kF32, {64, 63}).walk().elements(), 64 * 63);
  EXPECT_THROW(piece(Format::kMxfp8, DType::kF32, {Index{1} << 40, Index{1} << 20}), Error);
  EXPECT_EQ(piece(Format::kMxfp8, DType::kF32, {0, 64}).bytes(), 0);
  EXPECT_THROW(WirePiece({.shape = {16, 16}, .region = Region::full(Shape{16, 16}), .fused = true, .row0 = -16}),
               Error);
}

}  // namespace
}  // namespace tessera
