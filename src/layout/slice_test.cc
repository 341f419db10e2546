#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "layout/random_layout.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

std::string sliced(std::string_view text, const Shape& shape, const std::vector<Slice>& slices) {
  const Layout layout = sliced_layout(Layout::parse(text), shape, slices);
  return fmt::format("{} of {}", layout.to_string(), to_string_shape(sliced_shape(shape, slices)));
}

std::string sliced_error(std::string_view text, const Shape& shape, const std::vector<Slice>& slices) {
  return error_of([&] { sliced_layout(Layout::parse(text), shape, slices); });
}

TEST(Slice, OfADimThatIsTakenWholeKeepsItsPlacement) {
  EXPECT_EQ(sliced("dp=2,tp=2:S0*2,S0", {8, 6}, {{0, 8}, {2, 5}}), "dp=2,tp=2:S0*2,S0 of 8x3");
  EXPECT_EQ(sliced("2:Psum", {8, 6}, {{0, 8, 3}, {5, 5}}), "2:Psum of 3x0");
}

TEST(Slice, OfADimThatIsShardedIsRagged) {
  EXPECT_EQ(sliced("4:S0", {8, 6}, {{3, 8}, {0, 6}}), "4:G0[0;0;1;3;5] of 5x6");
  EXPECT_EQ(sliced("2,3:R,S1", {8, 7}, {{0, 8}, {0, 4}}), "2,3:R,G1[0;3;4;4] of 8x4");
  EXPECT_EQ(sliced("3:G0[0;1;7;8]", {8}, {{1, 1}}), "3:G0[0;0;0;0] of 0");
}

TEST(Slice, OfOneElementIsOnTheRanksThatHoldIt) {
  EXPECT_EQ(sliced("ep=2,tp=2:S0,S1", {4, 6}, {{3, 4, 1, true}, {0, 6}}), "tp=2@2-3:S0 of 6");
  EXPECT_EQ(sliced("ep=2,tp=2:S1,S0", {4, 6}, {{1, 2, 1, true}, {0, 6}}), "ep=2@0,2:S0 of 6");
  EXPECT_EQ(sliced("2,2@4-7:S0*2,S0", {4}, {{2, 3, 1, true}}), "1@5:R of scalar");
}

TEST(Slice, WithoutALayoutIsAnErrorThatShowsIt) {
  EXPECT_EQ(
      sliced_error("2,2:S0,S0", {8}, {{0, 4}}),
      "unimplemented: slice [0:4] cuts dim 0, which 2,2:S0,S0 shards by several axes: such a slice has no layout");
  EXPECT_EQ(sliced_error("2:S0*2", {8}, {{0, 4}}),
            "unimplemented: slice [0:4] cuts dim 0, which 2:S0*2 shards, not contiguously: such a slice has no layout");
  EXPECT_EQ(sliced_error("2:S0", {8}, {{0, 8, 2}}),
            "unimplemented: slice [0:8:2] cuts dim 0, which 2:S0 shards: of a sharded dim, take contiguous slices");
}

TEST(Slice, OutsideTheTensorIsAnError) {
  EXPECT_EQ(sliced_error("1:R", {8, 2}, {{0, 4}}), "slice [0:4] has 1 dims, the tensor (8x2) has 2");
  for (const Slice& wrong : {Slice{0, 9}, {-1, 3}, {4, 3}, {0, 8, 0}, {0, 8, -1}, {8, 9, 1, true}, {1, 3, 1, true}})
    EXPECT_TRUE(sliced_error("1:R", {8}, {wrong}).starts_with("slice [")) << sliced_error("1:R", {8}, {wrong});
}

// Every rank's share of the slice is a view of its part of the whole, at local_slices().
TEST(Slice, IsAViewOnEveryRank) {
  RandomLayouts random(11);
  int cut = 0;
  for (int round = 0; round < 4000; ++round) {
    const Shape shape = random.shape();
    const Layout layout = random.layout(shape).bind(shape);
    std::vector<Slice> slices;
    for (const Index size : shape) {
      const Index begin = random.draw(0, size);
      slices.push_back({begin, random.draw(begin, size), random.one_in(6) ? 2 : 1});
      if (random.one_in(3)) slices.back() = {0, size};
      if (random.one_in(5) && begin < size) slices.back() = {begin, begin + 1, 1, true};
    }
    Layout found;
    if (error_of([&] { found = sliced_layout(layout, shape, slices); }) != "(no error)") continue;
    ++cut;
    const Shape taken = sliced_shape(shape, slices);
    const Layout bound = found.bind(taken);
    for (const Rank rank : layout.mesh().ranks()) {
      const Region whole = layout.owned(shape, rank);
      const Region part = bound.owned(taken, rank);
      std::vector<std::vector<Index>> wanted;  // by dim of the slice: elements of the whole on this rank
      bool here = !whole.empty();
      for (size_t d = 0; d < shape.size() && here; ++d) {
        std::vector<Index> elements;
        for (Index i = slices[d].begin; i < slices[d].end; i += slices[d].step)
          if (whole.dim(static_cast<int>(d)).contains(i)) elements.push_back(i);
        here = !elements.empty();
        if (!slices[d].dropped) wanted.push_back(elements);
      }
      ASSERT_EQ(!part.empty(), here) << layout.to_string() << " [" << to_string(slices) << "] rank " << rank;
      if (!here) continue;
      const std::vector<Slice> local = local_slices(layout, shape, slices, rank);
      for (size_t d = 0, kept = 0; d < shape.size(); ++d) {
        const IntervalSet& held = whole.dim(static_cast<int>(d));
        if (slices[d].dropped) {
          EXPECT_EQ(local[d].begin, held.position_of(slices[d].begin));
          continue;
        }
        std::vector<Index> by_part, by_view, positions;
        for (const Index i : wanted[kept]) positions.push_back(held.position_of(i));
        for (Index i = local[d].begin; i < local[d].end; i += local[d].step) by_view.push_back(i);
        for (const Interval& interval : part.dim(static_cast<int>(kept)).intervals())
          for (Index i = interval.begin; i < interval.end; ++i) by_part.push_back(slices[d].begin + i * slices[d].step);
        EXPECT_EQ(by_part, wanted[kept]) << layout.to_string() << " [" << to_string(slices) << "] rank " << rank;
        EXPECT_EQ(by_view, positions) << layout.to_string() << " [" << to_string(slices) << "] rank " << rank;
        ++kept;
      }
    }
  }
  EXPECT_GT(cut, 1500);
}

}  // namespace
}  // namespace tessera
