#include "etp/schedule/gather_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::etp {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(GatherCosts, WeightsOfOneShapeShareAPool) {
  BufferKeys keys;
  const GatheredWeight weight{.padded_rows = 64, .columns = 32, .format = WeightFormat(DType::kBF16)};
  const GatherCost cost = gather_cost(weight, keys);
  EXPECT_THAT(cost.row, ElementsAre(GatherBuffer{0, 4096}));
  EXPECT_THAT(cost.column, IsEmpty());
  EXPECT_EQ(cost.buffers(Plane::kColumn), cost.row);
  EXPECT_EQ(gather_cost(weight, keys).row, cost.row);
  EXPECT_EQ(keys.size(), 1U);
  GatheredWeight other = weight;
  other.group = 1;
  EXPECT_THAT(gather_cost(other, keys).row, ElementsAre(GatherBuffer{1, 4096}));
  EXPECT_EQ(keys.key(1).group, 1U);
}

TEST(GatherCosts, TwoPlanesAndExpertsHaveBuffersOfTheirOwn) {
  BufferKeys keys;
  const GatherCost cost = gather_cost({.padded_rows = 64,
                                       .columns = 32,
                                       .format = WeightFormat(Format::kMxfp8),
                                       .chain = Chain::kGraphed,
                                       .experts = 2},
                                      keys);
  EXPECT_TRUE(cost.experts);
  EXPECT_EQ(cost.chain, Chain::kGraphed);
  EXPECT_THAT(cost.row, ElementsAre(GatherBuffer{0, 64 * 32 + 64}, GatherBuffer{1, 64 * 32 + 64}));
  EXPECT_THAT(cost.column, ElementsAre(GatherBuffer{2, 64 * 32 + 64}, GatherBuffer{3, 64 * 32 + 64}));
  EXPECT_EQ(cost.bytes(Plane::kRow), 2 * (64 * 32 + 64));
  EXPECT_EQ(keys.key(3).expert, 1);
  EXPECT_EQ(keys.key(3).plane, Plane::kColumn);
}

}  // namespace
}  // namespace tessera::etp
