#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>

#include "base/testing.h"
#include "layout/brute_force.h"
#include "layout/random_layout.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

Layout bound(std::string_view text, const Shape& shape) {
  return Layout::parse(text).bind(shape);
}

std::string owned(std::string_view text, const Shape& shape, Rank rank) {
  return bound(text, shape).owned(shape, rank).to_string();
}

std::string bind_error(std::string_view text, const Shape& shape) {
  return error_of([&] { bound(text, shape); });
}

std::vector<Index> elements_of(const IntervalSet& set) {
  std::vector<Index> elements;
  for (const Interval& interval : set.intervals()) {
    for (Index i = interval.begin; i < interval.end; ++i) elements.push_back(i);
  }
  return elements;
}

TEST(LayoutTest, ShardSplitsLikeTorchChunk) {
  EXPECT_EQ(owned("4:S0", {5}, 0), "[0:2]");
  EXPECT_EQ(owned("4:S0", {5}, 2), "[4:5]");
  EXPECT_EQ(owned("4:S0", {5}, 3), "[]");
}

TEST(LayoutTest, AxesOnOneDimNestLeftToRightAndStridedShardReordersThat) {
  EXPECT_EQ(owned("dp=2,tp=2:S0,S0", {8, 3}, 1), "[2:4][0:3]");
  EXPECT_EQ(owned("dp=2,tp=2:S0*2,S0", {8, 3}, 1), "[4:6][0:3]");
  EXPECT_EQ(owned("2:S0*3", {9}, 0), "[0:2,3:5,6:8]");
}

TEST(LayoutTest, InnerAxesChunkARaggedPiece) {
  EXPECT_EQ(owned("3,2:G0[0;1;7;8],S0", {8}, 2), "[1:4]");
  EXPECT_EQ(owned("3,2:G0[0;1;7;8],S0", {8}, 3), "[4:7]");
  EXPECT_EQ(owned("3,2:G0[0;1;7;8],S0", {8}, 1), "[]");
  EXPECT_EQ(owned("3:G-1[0;0;4;4]", {2, 4}, 1), "[0:2][0:4]");
}

TEST(LayoutTest, ARankOutsideTheMeshOwnsNothing) {
  EXPECT_EQ(bound("2@4-5:R", {3}).owned(Shape{3}, 3), Region::none(1));
  EXPECT_EQ(bound("2@4-5:R", {}).owned(Shape{}, 3), Region::none(0));
  EXPECT_EQ(bound("2@4-5:R", {}).owned(Shape{}, 5), Region());
}

TEST(LayoutTest, EveryRankOwnsExactlyWhatTheBruteForceDealsIt) {
  RandomLayouts random(7);
  for (int i = 0; i < 20'000; ++i) {
    const Shape shape = random.shape();
    const Layout written = random.layout(shape);
    const Layout layout = written.bind(shape);
    const auto position = static_cast<int>(random.draw(0, layout.mesh().size() - 1));
    const Rank rank = layout.mesh().ranks()[static_cast<size_t>(position)];
    const Region region = layout.owned(shape, rank);
    const std::vector<brute::Elements> held = brute::held_along(written, shape, position);
    ASSERT_EQ(static_cast<size_t>(region.ndim()), held.size());
    for (int d = 0; d < region.ndim(); ++d) {
      ASSERT_EQ(elements_of(region.dim(d)), held[static_cast<size_t>(d)])
          << written.to_string() << " on " << to_string_shape(shape) << ", rank " << rank << ", dim " << d;
    }
    ASSERT_EQ(layout.local_shape(shape, rank), region.extents());
  }
}

TEST(LayoutTest, EveryElementIsOwnedOnceForEachReplica) {
  RandomLayouts random(8);
  for (int i = 0; i < 1000; ++i) {
    const Shape shape = random.shape();
    const Layout layout = random.layout(shape).bind(shape);
    Index replicas = 1;
    for (size_t axis = 0; axis < layout.placements().size(); ++axis) {
      const bool shards = brute::dim_of(layout.placements()[axis], static_cast<int>(shape.size())) >= 0;
      if (!shards) replicas *= layout.mesh().axes()[axis].size;
    }
    Index owned_in_all = 0;
    for (const Rank rank : layout.mesh().ranks()) owned_in_all += layout.owned(shape, rank).size();
    ASSERT_EQ(owned_in_all, replicas * element_count(shape)) << layout.to_string();
    for (const std::vector<bool>& owners : brute::owner_mask(layout, shape)) {
      ASSERT_EQ(std::count(owners.begin(), owners.end(), true), replicas) << layout.to_string();
    }
  }
}

TEST(PartitionTest, PartsAreWhatRanksOwnAndCoverTheDimOnce) {
  RandomLayouts random(9);
  for (int i = 0; i < 3000; ++i) {
    const Shape shape = random.shape();
    const Layout layout = random.layout(shape).bind(shape);
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      const DimPartition partition = partition_dim(layout, shape[static_cast<size_t>(d)], d);
      Index covered = 0;
      for (const IntervalSet& part : partition.parts) covered += part.size();
      ASSERT_EQ(covered, shape[static_cast<size_t>(d)]);
      for (int position = 0; position < layout.mesh().size(); ++position) {
        const std::vector<int> coordinate = layout.mesh().coordinate(position);
        size_t part = 0;
        for (const int axis : partition.axes) {
          const auto a = static_cast<size_t>(axis);
          part = part * static_cast<size_t>(layout.mesh().axes()[a].size) + static_cast<size_t>(coordinate[a]);
        }
        const Rank rank = layout.mesh().ranks()[static_cast<size_t>(position)];
        ASSERT_EQ(partition.parts[part], layout.owned(shape, rank).dim(d)) << layout.to_string();
      }
    }
  }
}

TEST(PartitionTest, ADimThatNoAxisCutsIsOnePart) {
  const DimPartition partition = partition_dim(bound("2,2:S1,R", {4, 6}), 4, 0);
  EXPECT_TRUE(partition.axes.empty());
  EXPECT_EQ(partition.parts, std::vector<IntervalSet>{IntervalSet({0, 4})});
}

TEST(LayoutTest, BindCountsNegativeDimsFromTheEnd) {
  EXPECT_EQ(bound("2,2,2:S-1,S-2*3,G-3[0;1;4]", {4, 5, 6}).to_string(), "2,2,2:S2,S1*3,G0[0;1;4]");
}

TEST(LayoutTest, BindNamesThePlacementThatDoesNotFit) {
  const struct {
    std::string_view text;
    Shape shape;
    std::string_view message;
  } cases[] = {
      {"2:S2", {4, 4}, "layout \"2:S2\", placement \"S2\" on shape 4x4: there is no dim 2 among 2"},
      {"2:S-3", {4, 4}, "layout \"2:S-3\", placement \"S-3\" on shape 4x4: there is no dim -3 among 2"},
      {"2:S0", {}, "layout \"2:S0\", placement \"S0\" on shape scalar: there is no dim 0 among 0"},
      {"2:G0[0;4]",
       {4},
       "layout \"2:G0[0;4]\", placement \"G0[0;4]\" on shape 4: 2 bounds for an axis of 2: it takes 3"},
      {"2:G0[0;2;5]",
       {4},
       "layout \"2:G0[0;2;5]\", placement \"G0[0;2;5]\" on shape 4: the bounds go from 0 to 5 where the dim goes from "
       "0 "
       "to 4"},
      {"3:G0[0;3;2;4]",
       {4},
       "layout \"3:G0[0;3;2;4]\", placement \"G0[0;3;2;4]\" on shape 4: the bounds fall from 3 to 2"},
      {"2,2:S0,G0[0;2;4]",
       {4},
       "layout \"2,2:S0,G0[0;2;4]\", placement \"G0[0;2;4]\" on shape 4: a ragged placement must be the leftmost on "
       "its "
       "dim"},
      {"2,2:S0*2,G0[0;0;0]",
       {0},
       "layout \"2,2:S0*2,G0[0;0;0]\", placement \"G0[0;0;0]\" on shape 0: a ragged placement must be the leftmost on "
       "its dim"},
      {"2,2:Psum,Pmax",
       {4},
       "layout \"2,2:Psum,Pmax\", placement \"Pmax\" on shape 4: another axis is partial by sum, and one tensor has "
       "one "
       "operation"},
  };
  for (const auto& [text, shape, message] : cases) EXPECT_EQ(bind_error(text, shape), message);
  EXPECT_EQ(error_of([] { Layout(Mesh({{"", 2}}), {StridedShard{0, 0}}).bind(Shape{4}); }),
            "layout \"2:S0*0\", placement \"S0*0\" on shape 4: a split factor is 1 to 2^62, not 0");
}

TEST(LayoutTest, ReadsOfPartialAxes) {
  EXPECT_EQ(bound("2,2:S0,Pmax", {4}).partial_op(), ReduceOp::kMax);
  EXPECT_FALSE(bound("2,2:S0,R", {4}).has_partial());
  EXPECT_EQ(owned("2,2:Psum,S0", {4}, 3), "[2:4]");
}

TEST(LayoutTest, HugeSplitFactorsCostNoMoreThanTheElements) {
  EXPECT_EQ(owned("2:S0*4611686018427387904", {5}, 0), "[0:5]");
  EXPECT_EQ(owned("2:S0*4611686018427387904", {5}, 1), "[]");
  EXPECT_EQ(
      bind_error("2:S0*1000000000", {1'000'000'000'000}),
      "layout \"2:S0*1000000000\", placement \"S0*1000000000\" on shape 1000000000000: dim 0 would be cut into more "
      "than 16777216 intervals");
  // Few elements, but each of a million ranks would need each of a million pieces.
  EXPECT_THAT(bind_error("1048576:S0*1048576", {1 << 20}), testing::HasSubstr("more than 16777216 intervals"));
  EXPECT_EQ(bind_error("8192,8:S0*8,S0", {1 << 30}), "(no error)");
  EXPECT_EQ(owned("4:S0", {kMaxElements - 1}, 3), "[3458764513820540928:4611686018427387903]");
  EXPECT_EQ(owned("1048576:S0", {kMaxElements}, 1048575), "[4611681620380876800:4611686018427387904]");
}

TEST(LayoutTest, OtherRanksSamePlacements) {
  const Layout layout = Layout::parse("dp=2,tp=2:R,S0");
  EXPECT_EQ(layout.shifted(8).to_string(), "dp=2,tp=2@8-11:R,S0");
  EXPECT_EQ(layout.shifted(8).shifted(-8), layout);
  EXPECT_EQ(layout.with_ranks({5, 3, 9, 1}).to_string(), "dp=2,tp=2@5,3,9,1:R,S0");
  EXPECT_EQ(error_of([&] { layout.shifted(-1); }), "layout \"dp=2,tp=2:R,S0\": its ranks cannot be shifted by -1");
  EXPECT_EQ(error_of([&] { layout.shifted(2147483647); }),
            "layout \"dp=2,tp=2:R,S0\": its ranks cannot be shifted by 2147483647");
  EXPECT_EQ(error_of([&] { layout.with_ranks({1, 2}); }), "2 ranks for a mesh of 4");
}

// Quadratic work would take minutes here. CPU time, with room for sanitizers.
TEST(PartitionTest, CostsWhatItsIntervalsCost) {
  const std::clock_t begin = std::clock();
  const Index size = Index{1} << 40;
  EXPECT_EQ(partition_dim(bound("1048576:S0", {size}), size, 0).parts.size(), size_t{1} << 20);
  const DimPartition strided = partition_dim(bound("512,64:S0*64,S0", {size}), size, 0);
  EXPECT_EQ(strided.parts.size(), 512U * 64U);
  EXPECT_EQ(strided.parts[1].intervals().size(), 1U);
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 20.0);
}

}  // namespace
}  // namespace tessera
