#include "transport/shm/pull_cost.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(PullCost, TheRingIsTakenOnlyWhereItWinsClearly) {
  const PullCosts costs{.readv = {.byte = 1e-10, .piece = 4e-7}, .ring = {.byte = 2e-10, .piece = 2e-8}};
  EXPECT_EQ(cheaper_private_path(costs, int64_t{1} << 30, 1), PullPath::kGet);
  EXPECT_EQ(cheaper_private_path(costs, int64_t{1} << 30, int64_t{1} << 10), PullPath::kGet);   // 1 MiB pieces
  EXPECT_EQ(cheaper_private_path(costs, int64_t{1} << 30, int64_t{1} << 20), PullPath::kRing);  // 1 KiB pieces
  EXPECT_EQ(cheaper_private_path({.readv = {.byte = 1}, .ring = {.byte = 0.9}}, 100, 0), PullPath::kGet);
}

TEST(PullCost, IsMeasuredOnThisMachine) {
  const PullCosts costs = measure_pull_costs();
  EXPECT_GT(costs.ring.byte, 0);
  EXPECT_GT(costs.readv.byte, 0);
  EXPECT_GE(costs.readv.piece, 0);
}

}  // namespace
}  // namespace tessera
