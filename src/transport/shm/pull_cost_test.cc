#include "transport/shm/pull_cost.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(PathCost, TheStreamIsTakenOnlyWhereItWinsClearly) {
  const PathCost get{.byte = 1e-10, .piece = 4e-7};
  const PathCost stream{.byte = 2e-10, .piece = 2e-8};
  EXPECT_EQ(cheaper_access(get, stream, int64_t{1} << 30, 1), Access::kGet);
  EXPECT_EQ(cheaper_access(get, stream, int64_t{1} << 30, int64_t{1} << 10), Access::kGet);     // 1 MiB pieces
  EXPECT_EQ(cheaper_access(get, stream, int64_t{1} << 30, int64_t{1} << 20), Access::kStream);  // 1 KiB pieces
  EXPECT_EQ(cheaper_access({.byte = 1}, {.byte = 0.9}, 100, 0), Access::kGet);
}

TEST(PullCost, IsMeasuredOnThisMachine) {
  const PullCosts costs = measure_pull_costs();
  EXPECT_GT(costs.ring.byte, 0);
  EXPECT_GT(costs.readv.byte, 0);
  EXPECT_GE(costs.readv.piece, 0);
}

}  // namespace
}  // namespace tessera
