// No rank sends much more than its fair share, for one tensor and for a batch of ten thousand.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>

#include "plan/realistic_layouts.h"

namespace tessera::plan {
namespace {

constexpr int kBatch = 10'000;

double ratio(const PlanStats& stats) {
  return stats.max_egress_lower_bound == 0
             ? 1.0
             : static_cast<double>(stats.max_egress) / static_cast<double>(stats.max_egress_lower_bound);
}

TEST(Balance, EachRealisticTensorStaysWithinFivePercent) {
  for (const Relayout& r : realistic_relayouts()) {
    const Plan plan = redistribute(r.meta, r.src, r.dst);
    EXPECT_LE(ratio(plan.stats), 1.05) << r.name;
    EXPECT_EQ(plan.stats.bytes_moved, plan.stats.bytes_lower_bound) << r.name;
  }
}

TEST(Balance, ThereAreFortyKinds) {
  EXPECT_EQ(realistic_relayouts().size(), 40U);
}

// The batches of one scenario: its five kinds, drawn by `choose`, with shapes that `shrink` makes small.
template <typename Choose, typename Shrink>
void expect_balanced_batches(Choose choose, Shrink shrink) {
  const auto all = realistic_relayouts();
  for (size_t first = 0; first < all.size(); first += 5) {
    BatchPlanner batch;
    for (int i = 0; i < kBatch; ++i) {
      const Relayout& r = all[first + choose(i)];
      batch.add({shrink(r.meta.shape, i), r.meta.dtype}, r.src, r.dst);
    }
    EXPECT_LE(ratio(batch.stats()), 1.05) << all[first].name;
  }
}

// Tensors of three to a hundred elements: fewer than the members of most classes.
Shape few_elements(const Shape& shape, int i) {
  Shape small(shape.size(), 1);
  small[0] = 3 + i % 40;
  if (small.size() > 1) small[1] = 1 + i % 3;
  return small;
}

TEST(Balance, TenThousandTinyTensorsOfManySizesStayWithinFivePercent) {
  std::mt19937 random(7);
  expect_balanced_batches([&](int) { return random() % 5; }, few_elements);
}

TEST(Balance, APatternThatRepeatsEveryTwelveTensorsDoesNotBeatTheRotation) {
  const auto choose = [](int i) {
    return std::array<size_t, 12>{3, 1, 3, 1, 3, 2, 3, 2, 3, 1, 3, 4}[static_cast<size_t>(i % 12)];
  };
  expect_balanced_batches(choose, [](const Shape& shape, int i) {
    Shape small = few_elements(shape, i % 12);
    small[0] = 16 * (1 + i % 5);
    if (small.size() > 1) small[1] = 8 * (1 + i % 3);
    return small;
  });
}

TEST(Balance, BigAndSmallInTurnOnTwoReplicasAreSharedEvenly) {
  const Layout src = Layout::parse("2@0-1:R");
  const Layout dst = Layout::parse("1@2:R");
  BatchPlanner batch(PlanOptions{.hosts = {}, .min_piece_bytes = kBusMinPiece});
  for (int i = 0; i < kBatch; ++i) batch.add({{i % 2 == 0 ? 30'000 : 10}, DType::kBF16}, src, dst);
  EXPECT_LE(ratio(batch.stats()), 1.05);
  EXPECT_EQ(batch.kinds(), 2U);
}

TEST(Balance, TensorsBelowTheSmallestPieceAreWholeAndTakeTurns) {
  const Layout src = Layout::parse("dp=8,fsdp=2:R,S0");
  const Layout dst = Layout::parse("4@16-19:S0");
  BatchPlanner batch(PlanOptions{.hosts = {}, .min_piece_bytes = kBusMinPiece});
  for (int i = 0; i < kBatch; ++i) batch.add({{1024 + 64 * (i % 3)}, DType::kBF16}, src, dst);
  EXPECT_EQ(batch.plan(0).routes.size(), 4U);
  EXPECT_EQ(batch.stats().routes, 4 * kBatch);
  EXPECT_LE(ratio(batch.stats()), 1.05);
}

TEST(Balance, NestedClassesCountTogetherInTheBound) {
  // Only rank 0 holds the first tensor; ranks 0 and 1 hold the second, and rank 1 could send all of it.
  BatchPlanner batch;
  batch.add({{100}, DType::kU8}, Layout::parse("1@0:R"), Layout::parse("1@2:R"));
  batch.add({{300}, DType::kU8}, Layout::parse("2@0-1:R"), Layout::parse("1@2:R"));
  EXPECT_EQ(batch.stats().max_egress_lower_bound, 200);
}

TEST(Balance, HostsComeFirstThenTheirRanks) {
  // Two hosts hold a replica each; the third needs everything once over the network, and the first serves its own rank.
  const PlanOptions options{.hosts = {{0, 1, 4}, {2, 3}, {5, 6}}};
  const Plan plan = redistribute({{1024, 64}, DType::kU8}, Layout::parse("4@0-3:R"), Layout::parse("3@4-6:R"), options);
  EXPECT_EQ(plan.stats.bytes_between_hosts, 1024 * 64);
  std::map<Rank, int64_t> sent;
  for (const auto& [rank, bytes] : plan.egress()) sent[rank] = bytes;
  EXPECT_EQ(sent[0] + sent[1], 1024 * 64 * 3 / 2);
  EXPECT_EQ(sent[2], 1024 * 16);
  EXPECT_EQ(sent[3], 1024 * 16);
}

}  // namespace
}  // namespace tessera::plan
