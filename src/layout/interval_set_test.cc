#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>

#include "tessera/layout.h"

namespace tessera {
namespace {

using Model = std::set<Index>;

IntervalSet of(std::initializer_list<Interval> intervals) {
  return IntervalSet::of_sorted(std::span(intervals.begin(), intervals.size()));
}

Model model_of(const IntervalSet& set) {
  Model model;
  for (const Interval& interval : set.intervals()) {
    for (Index i = interval.begin; i < interval.end; ++i) model.insert(i);
  }
  return model;
}

// The maximal runs of the model: the only canonical value.
IntervalSet set_of(const Model& model) {
  std::vector<Interval> single;
  for (const Index i : model) single.push_back({i, i + 1});
  return IntervalSet::of_sorted(single);
}

Model random_model(std::mt19937_64& random) {
  Model model;
  const uint64_t density = random() % 5;
  for (Index i = 0; i < 40; ++i) {
    if (random() % 4 < density) model.insert(i);
  }
  return model;
}

TEST(IntervalSetTest, OneValueForOneSet) {
  EXPECT_EQ(of({{0, 2}, {2, 5}, {5, 5}, {7, 8}}), of({{0, 5}, {7, 8}}));
  EXPECT_EQ(of({{3, 3}}), IntervalSet());
  EXPECT_EQ(IntervalSet({4, 4}), IntervalSet());
  EXPECT_EQ(IntervalSet({4, 2}), IntervalSet());
  EXPECT_EQ(IntervalSet({4, 9}).size(), 5);
}

TEST(IntervalSetTest, IntervalsAreSortedDisjointAndApart) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const Model model = random_model(random);
    const IntervalSet set = set_of(model);
    ASSERT_EQ(model_of(set), model);
    ASSERT_EQ(set.size(), static_cast<Index>(model.size()));
    ASSERT_EQ(set.empty(), model.empty());
    for (size_t i = 1; i < set.intervals().size(); ++i) {
      ASSERT_LT(set.intervals()[i - 1].end, set.intervals()[i].begin);
    }
  }
}

TEST(IntervalSetTest, MembershipAndPositionsCountElements) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    const Model model = random_model(random);
    const IntervalSet set = set_of(model);
    for (Index i = -1; i <= 41; ++i) {
      ASSERT_EQ(set.contains(i), model.contains(i)) << i;
      ASSERT_EQ(set.position_of(i), std::distance(model.begin(), model.lower_bound(i))) << i;
    }
  }
}

TEST(IntervalSetTest, SliceTakesPositions) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const Model model = random_model(random);
    const IntervalSet set = set_of(model);
    const std::vector<Index> elements(model.begin(), model.end());
    for (Index first = 0; first <= set.size(); ++first) {
      for (Index last = first; last <= set.size(); last += 3) {
        ASSERT_EQ(set.slice(first, last), set_of(Model(elements.begin() + first, elements.begin() + last)));
      }
    }
  }
}

TEST(IntervalSetTest, IntersectionIsThatOfTheElements) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 2000; ++round) {
    const Model a = random_model(random);
    const Model b = random_model(random);
    Model both;
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(both, both.end()));
    ASSERT_EQ(set_of(a).intersect(set_of(b)), set_of(both));
    ASSERT_EQ(set_of(b).intersect(set_of(a)), set_of(both));
  }
}

TEST(RegionTest, HoldsTheProductOfItsDims) {
  const Region region({of({{0, 4}, {8, 12}}), of({{0, 16}})});
  EXPECT_EQ(region.to_string(), "[0:4,8:12][0:16]");
  EXPECT_EQ(region.size(), 8 * 16);
  EXPECT_EQ(region.extents(), (Shape{8, 16}));
  EXPECT_EQ(region.intersect(Region({of({{2, 9}}), of({{15, 20}})})).to_string(), "[2:4,8:9][15:16]");
}

TEST(RegionTest, AnEmptyDimEmptiesItButTheOtherExtentsStay) {
  const Region region = Region::full(Shape{0, 16});
  EXPECT_TRUE(region.empty());
  EXPECT_EQ(region.size(), 0);
  EXPECT_EQ(region.extents(), (Shape{0, 16}));
  EXPECT_EQ(region.to_string(), "[][0:16]");
  EXPECT_EQ(Region::full(Shape{Index{1} << 40, 0, Index{1} << 40}).size(), 0);
}

TEST(RegionTest, AScalarIsOneElementUnlessItIsNone) {
  EXPECT_EQ(Region::full({}), Region());
  EXPECT_EQ(Region().size(), 1);
  EXPECT_EQ(Region::none(0).size(), 0);
  EXPECT_NE(Region::none(0), Region());
  EXPECT_EQ(Region().intersect(Region::none(0)), Region::none(0));
  EXPECT_EQ(Region::none(0).intersect(Region()), Region::none(0));
  EXPECT_EQ(Region().intersect(Region()), Region());
  EXPECT_EQ(Region::none(2).extents(), (Shape{0, 0}));
  EXPECT_TRUE(Region::none(2).empty());
}

}  // namespace
}  // namespace tessera
