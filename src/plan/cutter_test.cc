#include "plan/cutter.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::plan {
namespace {

// The boxes of a piece: "0:2,0:8 | 2:3,0:4".
std::string piece(const Cutter& cutter, size_t k, size_t ndim) {
  std::vector<Box> boxes;
  cutter.append_piece(k, boxes);
  std::string text;
  for (const Box& box : boxes) {
    text += text.empty() ? "" : " | ";
    for (size_t d = 0; d < ndim; ++d)
      text += (d == 0 ? "" : ",") + std::to_string(box.first[d]) + ":" + std::to_string(box.last[d]);
  }
  return text;
}

CutRules rules(Index share, Index min_piece = 1) {
  CutRules rules{.granule = {}, .share = share, .min_piece = min_piece};
  rules.granule.fill(1);
  return rules;
}

const std::vector<Index> kHalf{12};

TEST(Cutter, TakesTheFirstDimInWhichTheCutLandsOnAnEdge) {
  const Cutter cutter(Shape{6, 4}, kHalf, rules(12));
  EXPECT_EQ(piece(cutter, 0, 2), "0:3,0:4");
  EXPECT_EQ(piece(cutter, 1, 2), "3:6,0:4");
}

TEST(Cutter, TakesALaterDimWhereTheFirstIsTooCoarse) {
  const Cutter cutter(Shape{3, 8}, kHalf, rules(12));
  EXPECT_EQ(piece(cutter, 0, 2), "0:3,0:4");
  EXPECT_EQ(piece(cutter, 1, 2), "0:3,4:8");
}

TEST(Cutter, GoesThroughSeveralDimsWhereNoneIsFineEnough) {
  const std::vector<Index> places{8, 15};
  const Cutter cutter(Shape{3, 7}, places, rules(7));
  EXPECT_EQ(piece(cutter, 0, 2), "0:1,0:7 | 1:2,0:1");
  EXPECT_EQ(piece(cutter, 1, 2), "1:2,1:7 | 2:3,0:1");
  EXPECT_EQ(piece(cutter, 2, 2), "2:3,1:7");
}

TEST(Cutter, MissesByASixtyFourthOfAShareToKeepRowsWhole) {
  const std::vector<Index> places{64 * 100 + 60};
  const Cutter cutter(Shape{128, 100}, places, rules(6400));
  EXPECT_EQ(piece(cutter, 0, 2), "0:65,0:100");
  EXPECT_EQ(piece(cutter, 1, 2), "65:128,0:100");
}

TEST(Cutter, LeavesNoPieceBelowTheSmallest) {
  const std::vector<Index> places{3, 13};
  const Cutter cutter(Shape{1, 24}, places, rules(10, 8));
  EXPECT_EQ(piece(cutter, 0, 2), "");
  EXPECT_EQ(piece(cutter, 1, 2), "0:1,0:13");
  EXPECT_EQ(piece(cutter, 2, 2), "0:1,13:24");
}

TEST(Cutter, CutsAtMultiplesOfTheGranule) {
  CutRules halves = rules(5);
  halves.granule = {0, 2};
  const std::vector<Index> places{5};
  const Cutter cutter(Shape{1, 10}, places, halves);
  EXPECT_EQ(piece(cutter, 0, 2) + " and " + piece(cutter, 1, 2), " and 0:1,0:10");
}

// Every shape up to 4 x 4 x 4 and every pair of cuts: pieces cover the cell once, in order, with the requested sizes.
TEST(Cutter, ExactCutsCoverTheCellOnce) {
  for (Index code = 0; code < 64; ++code) {
    const Shape extents{1 + code % 4, 1 + code / 4 % 4, 1 + code / 16};
    const Index size = extents[0] * extents[1] * extents[2];
    for (Index a = 1; a < size; ++a) {
      for (Index b = a + 1; b < size; ++b) {
        const std::vector<Index> places{a, b};
        const Cutter cutter(extents, places, rules(1));
        std::vector<int> covered(static_cast<size_t>(size), 0);
        const Index wanted[] = {a, b - a, size - b};
        for (size_t k = 0; k < 3; ++k) {
          std::vector<Box> boxes;
          cutter.append_piece(k, boxes);
          Index elements = 0;
          for (const Box& box : boxes)
            for (Index x = box.first[0]; x < box.last[0]; ++x)
              for (Index y = box.first[1]; y < box.last[1]; ++y)
                for (Index z = box.first[2]; z < box.last[2]; ++z, ++elements)
                  ++covered[static_cast<size_t>((x * extents[1] + y) * extents[2] + z)];
          ASSERT_EQ(elements, wanted[k]) << to_string_shape(extents) << " at " << a << ", " << b;
        }
        for (const int times : covered) ASSERT_EQ(times, 1);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::plan
