#include "exec/sampled_routes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "exec/testing.h"

namespace tessera {
namespace {

using exec_testing::for_each_atom;

constexpr uint64_t kBlock = 16384;

// Each atom of the region looked at by itself.
struct PlainRange {
  uint64_t begin = UINT64_MAX;
  uint64_t end = 0;
  bool sampled = false;  // some byte lies in a chosen block
};
PlainRange plain_range(const RouteRegion& what, const DigestSample& sample) {
  PlainRange range;
  const Index per_atom = elements_per_atom(what.dtype);
  const auto bytes = static_cast<uint64_t>(atom_bytes(what.dtype));
  for_each_atom(what, [&](const std::vector<Index>& at) {
    uint64_t flat = 0;
    for (size_t d = 0; d < at.size(); ++d)
      flat = flat * static_cast<uint64_t>(d + 1 == at.size() ? what.shape[d] / per_atom : what.shape[d]) +
             static_cast<uint64_t>(at[d]);
    range.begin = std::min(range.begin, flat * bytes);
    range.end = std::max(range.end, (flat + 1) * bytes);
    const uint64_t block = flat * bytes / kBlock;
    range.sampled |= block == sample.block(block / DigestSample::kOneIn);
  });
  return range;
}

RouteRegion random_region(std::mt19937& random, uint32_t tensor) {
  RouteRegion what{.tensor = tensor, .dtype = random() % 4 == 0 ? DType::kF4 : DType::kF32};
  std::vector<IntervalSet> dims;
  for (int d = 0; d < 1 + static_cast<int>(random() % 3); ++d) {
    const Index size = 2 * (1 + static_cast<Index>(random() % (d == 0 ? 200 : 24)));
    const Index begin = 2 * (static_cast<Index>(random()) % (size / 2));
    const Index end = begin + 2 * (1 + static_cast<Index>(random()) % ((size - begin) / 2));
    const bool split = random() % 3 == 0 && end - begin > 4;
    const std::vector<Interval> cut{{begin, begin + 2}, {end - 2, end}};
    what.shape.push_back(size);
    dims.push_back(split ? IntervalSet::of_sorted(cut) : IntervalSet({begin, end}));
  }
  what.region = Region(dims);
  return what;
}

TEST(SampledRoutes, HoldARouteIfItHasAByteInAChosenBlock) {
  std::mt19937 random(11);
  SampledRoutes routes;
  std::vector<RouteRegion> whats;
  for (uint32_t i = 0; i < 300; ++i) {
    whats.push_back(random_region(random, i));
    routes.add(whats.back(), false);
  }
  size_t held = 0;
  for (uint64_t version = 1; version <= 5; ++version) {
    routes.draw(version);
    size_t count = 0;
    for (uint32_t i = 0; i < whats.size(); ++i) {
      const PlainRange plain = plain_range(whats[i], DigestSample(version, i));
      const ImageRange image = image_range(whats[i]);
      ASSERT_EQ(image.begin, plain.begin) << i;
      ASSERT_EQ(image.end, plain.end) << i;
      ASSERT_TRUE(routes.holds(i) || !plain.sampled) << i;
      count += routes.holds(i) ? 1 : 0;
    }
    EXPECT_EQ(count, routes.count());
    held += count;
  }
  // Most of these are below a block, of which one in sixteen is chosen; if all were held, nothing would be gained.
  EXPECT_GT(held, 50);
  EXPECT_LT(held, 750);
}

TEST(SampledRoutes, HoldAllWithoutASeedAndQuantisedOnesAlways) {
  SampledRoutes routes;
  const RouteRegion what{.tensor = 7, .shape = {64}, .region = Region::full(std::vector<Index>{64})};
  for (int i = 0; i < 32; ++i)
    routes.add({.tensor = static_cast<uint32_t>(i), .shape = what.shape, .region = what.region}, i % 2 == 0);
  EXPECT_EQ(routes.count(), 32);
  routes.draw(3);
  for (size_t i = 0; i < 32; i += 2) EXPECT_TRUE(routes.holds(i));
  EXPECT_LT(routes.count(), 32);
  EXPECT_EQ(routes.nothing(1).elements, 64);
  routes.draw(std::nullopt);
  EXPECT_EQ(routes.count(), 32);
  EXPECT_TRUE(routes.holds(1));
}

TEST(SampledRoutes, HoldARegionThatCoversAWholeGroupAndNoEmptyOne) {
  constexpr Index kGroup = 16 * kBlock;
  SampledRoutes routes;
  for (uint32_t i = 0; i < 64; ++i)
    routes.add({.tensor = i,
                .shape = {8 * kGroup},
                .dtype = DType::kU8,
                .region = Region({IntervalSet({100 * i, 100 * i + 2 * kGroup})})},
               false);
  routes.add({.tensor = 64, .shape = {kGroup}, .dtype = DType::kU8, .region = Region::none(1)}, false);
  for (uint64_t version = 1; version <= 20; ++version) {
    routes.draw(version);
    EXPECT_EQ(routes.count(), 64);
    EXPECT_FALSE(routes.holds(64));
  }
}

}  // namespace
}  // namespace tessera
