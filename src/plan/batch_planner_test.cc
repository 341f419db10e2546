#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "plan/realistic_layouts.h"
#include "tessera/error.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

const Layout kReplicas = Layout::parse("dp=4:R");
const Layout kOne = Layout::parse("1@4:R");

TEST(BatchPlanner, TensorsOfOneKindShareItTurnedByOneMember) {
  BatchPlanner batch;
  EXPECT_EQ(batch.add({{1}, DType::kF32}, kReplicas, kOne), 0U);
  EXPECT_EQ(batch.add({{1}, DType::kF32}, kReplicas, kOne), 1U);
  EXPECT_EQ(batch.add({{1}, DType::kF16}, kReplicas, kOne), 2U);
  EXPECT_EQ(batch.size(), 3U);
  EXPECT_EQ(batch.kinds(), 2U);
  EXPECT_EQ(batch.plan(0).routes[0].src, 0);
  EXPECT_EQ(batch.plan(1).routes[0].src, 1);
  EXPECT_EQ(batch.plan(2).routes[0].src, 2);
}

TEST(BatchPlanner, EveryoneComputesTheSamePlans) {
  const auto relayouts = plan::realistic_relayouts();
  const auto build = [&] {
    BatchPlanner batch;
    for (int i = 0; i < 80; ++i) {
      const auto& r = relayouts[static_cast<size_t>(i * 7 % 40)];
      batch.add({{r.meta.shape.size() == 1 ? Shape{i + 1} : r.meta.shape}, r.meta.dtype}, r.src, r.dst);
    }
    return batch;
  };
  const BatchPlanner one = build();
  const BatchPlanner other = build();
  for (uint32_t i = 0; i < one.size(); i += 9) EXPECT_EQ(one.plan(i).dump(), other.plan(i).dump());
  EXPECT_EQ(one.egress(), other.egress());
}

TEST(BatchPlanner, FiguresAreThoseOfThePlans) {
  BatchPlanner batch({.hosts = {{0, 1}, {2, 3}}, .min_piece_bytes = 16});
  for (int i = 0; i < 20; ++i)
    batch.add({{1 + i % 3, 7}, DType::kF32, i % 4 == 0 ? std::optional(Format::kMxfp8) : std::nullopt}, kReplicas,
              Layout::parse("2,2@2-5:S1,R"));
  PlanStats sum;
  std::map<Rank, int64_t> sent;
  for (uint32_t i = 0; i < batch.size(); ++i) {
    const Plan plan = batch.plan(i);
    sum.bytes_delivered += plan.stats.bytes_delivered;
    sum.bytes_moved += plan.stats.bytes_moved;
    sum.bytes_lower_bound += plan.stats.bytes_lower_bound;
    sum.bytes_between_hosts += plan.stats.bytes_between_hosts;
    sum.routes += plan.stats.routes;
    for (const auto& [rank, bytes] : plan.egress()) sent[rank] += bytes;
    for (const Route& route : plan.routes) {
      if (!plan.meta.wire || route.kind == RouteKind::kLocal) continue;
      sum.quantized_elements_moved += route.region.size() * std::ssize(plan.dsts(route));
      sum.quantized_bytes_moved += route.bytes * std::ssize(plan.dsts(route));
    }
  }
  const PlanStats stats = batch.stats();
  EXPECT_EQ(stats.bytes_delivered, sum.bytes_delivered);
  EXPECT_EQ(stats.bytes_moved, sum.bytes_moved);
  EXPECT_EQ(stats.bytes_lower_bound, sum.bytes_lower_bound);
  EXPECT_EQ(stats.bytes_between_hosts, sum.bytes_between_hosts);
  EXPECT_EQ(stats.routes, sum.routes);
  EXPECT_GT(stats.quantized_bytes_moved, 0);
  EXPECT_EQ(stats.quantized_elements_moved, sum.quantized_elements_moved);
  EXPECT_EQ(stats.quantized_bytes_moved, sum.quantized_bytes_moved);
  EXPECT_EQ(batch.egress(), (std::vector<std::pair<Rank, int64_t>>(sent.begin(), sent.end())));
}

// The routes of one rank's part, and the routes of the whole plan that involve the rank.
std::pair<std::string, std::string> part_and_filter(const BatchPlanner& batch, uint32_t ordinal, Rank rank) {
  const auto lines = [&](const Plan& plan, bool all) {
    std::string text;
    for (const Route& route : plan.routes) {
      const auto dsts = plan.dsts(route);
      if (!all && route.src != rank && !std::ranges::binary_search(dsts, rank)) continue;
      text += std::to_string(route.src) + " " + route.region.to_string();
      for (const Rank dst : dsts) text += " " + std::to_string(dst);
      text += "\n";
    }
    return text;
  };
  return {lines(batch.plan_for(ordinal, rank), true), lines(batch.plan(ordinal), false)};
}

TEST(BatchPlanner, ARankSeesItsOwnPartOfEveryRealisticPlan) {
  const auto relayouts = plan::realistic_relayouts();
  BatchPlanner batch;
  for (const auto& r : relayouts) batch.add(r.meta, r.src, r.dst);
  for (uint32_t i = 0; i < batch.size(); ++i) {
    for (const Rank rank : {relayouts[i].src.mesh().ranks().front(), relayouts[i].src.mesh().ranks().back(),
                            relayouts[i].dst.mesh().ranks()[1], relayouts[i].dst.mesh().ranks().back(), 5000}) {
      const auto [part, filtered] = part_and_filter(batch, i, rank);
      EXPECT_EQ(part, filtered) << relayouts[i].name << ", rank " << rank;
      if (rank == 5000) {
        EXPECT_EQ(part, "");
      }
    }
  }
}

TEST(BatchPlanner, ABadTensorLeavesTheBatchAsItWas) {
  BatchPlanner batch;
  batch.add({{8}, DType::kF32}, kReplicas, kOne);
  EXPECT_THROW(batch.add({{8}, DType::kF32}, Layout::parse("4:S1"), kOne), Error);
  EXPECT_EQ(batch.size(), 1U);
  EXPECT_EQ(batch.kinds(), 1U);
  EXPECT_THROW(batch.plan(1), Error);
  EXPECT_THROW(batch.plan_for(1, 0), Error);
}

// 256 elements of nvfp4 take 128 bytes for codes and one for scales; blocks of 128 by 128 round up.
TEST(BatchPlanner, AFormatCountsTheBytesOfCodesAndScales) {
  const auto bytes = [](std::optional<Format> wire) {
    BatchPlanner batch;
    batch.add({{256, 1024}, DType::kBF16, wire}, kReplicas, kOne);
    return batch.plan(0).stats.bytes_moved;
  };
  EXPECT_EQ(bytes(std::nullopt), 1024 * 256 * 2);
  EXPECT_EQ(bytes(Format::kNvfp4), 1024 * 129);
  EXPECT_EQ(bytes(Format::kMxfp8), 1024 * 264);
  EXPECT_EQ(bytes(Format::kFp8E4M3), 1024 * 256);
  EXPECT_EQ(bytes(Format::kFp8Block1x128), 1024 * 264);
  EXPECT_EQ(bytes(Format::kFp8Block128x128), 1024 * 2049 / 8);
}

TEST(BatchPlanner, TensorsOfOtherFormatsAreOtherKinds) {
  BatchPlanner batch;
  for (const std::optional<Format> wire : {std::optional<Format>(), std::optional(Format::kMxfp8)})
    for (int i = 0; i < 2; ++i) batch.add({{64, 64}, DType::kF32, wire}, kReplicas, kOne);
  EXPECT_EQ(batch.kinds(), 2U);
}

// Four-bit codes are no reason to refuse a cut that the elements allow.
TEST(BatchPlanner, AQuantisedTensorIsCutAsItsElementsAre) {
  const Layout columns = Layout::parse("2:S1");
  BatchPlanner batch;
  batch.add({{2, 6}, DType::kBF16, Format::kNvfp4}, columns, kOne);
  EXPECT_EQ(batch.plan(0).routes.size(), 2U);
  EXPECT_THROW(batch.add({{2, 6}, DType::kF4}, columns, kOne), Error);
}

// Terms are not quantised before they are reduced.
TEST(BatchPlanner, AReductionMovesTermsAsTheyAre) {
  const auto bytes = [](std::optional<Format> wire) {
    BatchPlanner batch;
    batch.add({{64, 64}, DType::kBF16, wire}, Layout::parse("4:Psum"), kOne);
    EXPECT_EQ(batch.stats().reduction_bytes, batch.plan(0).stats.reduction_bytes);
    return batch.stats().reduction_bytes;
  };
  EXPECT_EQ(bytes(Format::kNvfp4), bytes(std::nullopt));
}

TEST(BatchPlanner, KindsCostMemoryTensorsHardlyAny) {
  BatchPlanner batch;
  batch.add({{4096, 64}, DType::kBF16}, Layout::parse("1024:S0"), Layout::parse("1024@1024-2047:S1"));
  const size_t one = batch.memory_bytes();
  for (int i = 0; i < 1000; ++i)
    batch.add({{4096, 64}, DType::kBF16}, Layout::parse("1024:S0"), Layout::parse("1024@1024-2047:S1"));
  EXPECT_LT(batch.memory_bytes(), one + 40'000);
}

}  // namespace
}  // namespace tessera
