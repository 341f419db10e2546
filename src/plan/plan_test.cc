#include "tessera/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Plan plan_of(const char* shape, const char* dtype, const char* src, const char* dst, const PlanOptions& options = {}) {
  return redistribute({parse_shape(shape), parse_dtype(dtype)}, Layout::parse(src), Layout::parse(dst), options);
}

TEST(Plan, DumpIsStableText) {
  EXPECT_EQ(plan_of("8x6", "f32", "dp=2,fsdp=2@0-3:R,S0", "tp=2@2-3:S1").dump(),
            "tensor 8x6 f32\n"
            "from dp=2,fsdp=2:R,S0\n"
            "to tp=2@2-3:S1\n"
            "route local 2 -> 2 [0:4][0:3] 48\n"
            "route p2p 0 -> 3 [0:2][3:6] 24\n"
            "route p2p 2 -> 3 [2:4][3:6] 24\n"
            "route p2p 1 -> 2 [4:6][0:3] 24\n"
            "route p2p 3 -> 2 [6:8][0:3] 24\n"
            "route local 3 -> 3 [4:8][3:6] 48\n"
            "total routes=6 delivered=192 moved=96 lower_bound=96 between_hosts=0 reduction=0\n"
            "egress max=24 lower_bound=24\n");
}

TEST(Plan, DumpOfAReduceScatterShowsOwnersAndLocalRoutes) {
  EXPECT_EQ(plan_of("4", "bf16", "2:Psum", "2:S0").dump(),
            "tensor 4 bf16\n"
            "from 2:Psum\n"
            "to 2:S0\n"
            "reduce sum 0 of 0,1 [0:2]\n"
            "reduce sum 1 of 0,1 [2:4]\n"
            "route local 0 -> 0 [0:2] 4\n"
            "route local 1 -> 1 [2:4] 4\n"
            "total routes=2 delivered=8 moved=0 lower_bound=0 between_hosts=0 reduction=8\n"
            "egress max=0 lower_bound=0\n");
}

TEST(Plan, ReplicasOfAPartialSumShareTheReductions) {
  const Plan plan = plan_of("8", "f32", "dp=2,tp=2@0-3:R,Psum", "1@4:R");
  ASSERT_EQ(plan.reductions.size(), 4U);
  for (const Reduction& reduction : plan.reductions) {
    EXPECT_EQ(reduction.region.size(), 2);
    const auto peers = plan.peers(reduction);
    const std::vector<Rank> expected = reduction.owner < 2 ? std::vector<Rank>{0, 1} : std::vector<Rank>{2, 3};
    EXPECT_EQ(std::vector<Rank>(peers.begin(), peers.end()), expected);
  }
  EXPECT_EQ(plan.stats.max_egress, 8);
}

TEST(Plan, JsonHasTheDocumentedKeysAndGlobalIntervals) {
  const auto json = nlohmann::json::parse(plan_of("4x8", "i64", "2:S1*2", "1@2:R").to_json());
  EXPECT_EQ(json["shape"], (std::vector<int>{4, 8}));
  EXPECT_EQ(json["dtype"], "i64");
  const auto& route = json["routes"][1];
  EXPECT_EQ(route["src"], 1);
  EXPECT_EQ(route["dsts"], std::vector<int>{2});
  EXPECT_EQ(route["kind"], "p2p");
  EXPECT_EQ(route["region"].dump(), "[[[0,4]],[[2,4],[6,8]]]");
  EXPECT_EQ(route["bytes"], 4 * 4 * 8);
  EXPECT_EQ(json["reductions"].size(), 0U);
  for (const char* key : {"bytes_delivered", "bytes_moved", "bytes_lower_bound"}) EXPECT_EQ(json["stats"][key], 256);
  for (const char* key : {"max_egress", "max_egress_lower_bound"}) EXPECT_EQ(json["stats"][key], 128);
}

TEST(Plan, JsonOfAScalarHasAnEmptyRegion) {
  const auto json = nlohmann::json::parse(plan_of("scalar", "f64", "2:Pmax", "2@1-2:R").to_json());
  EXPECT_EQ(json["shape"].dump(), "[]");
  EXPECT_EQ(json["routes"][0]["region"].dump(), "[]");
  EXPECT_EQ(json["reductions"][0].dump(), R"({"op":"max","owner":1,"peers":[0,1],"region":[]})");
}

TEST(Plan, TensorsWithoutElementsNeedNoRoute) {
  const Plan plan = plan_of("0x5", "f32", "2:S0", "3:S1");
  EXPECT_TRUE(plan.routes.empty());
  EXPECT_EQ(plan.stats.bytes_lower_bound, 0);
  EXPECT_THAT(explain(plan), HasSubstr("Nothing has to move"));
  EXPECT_THAT(plan.to_svg(), HasSubstr("</svg>"));
}

TEST(Plan, GroupsAreStoredOnce) {
  const Plan plan = plan_of("1024x64", "bf16", "fsdp=64:S0", "dp=8,tp=8@64-127:R,S1");
  EXPECT_EQ(plan.routes.size(), 512U);
  EXPECT_EQ(plan.groups.size(), 8U);
}

TEST(Plan, ExplainNamesSendersTotalsBoundAndImbalance) {
  const std::string text = explain(plan_of("4096x4096", "bf16", "dp=2,fsdp=4@0-7:R,S0", "tp=4@8-11:S1"));
  EXPECT_THAT(text, StartsWith("4096x4096 of bf16\n"));
  EXPECT_THAT(text, HasSubstr("8 ranks hold 4 parts, each part on 2 ranks; 4 ranks want a part each."));
  EXPECT_THAT(text, HasSubstr("     0  8                        p2p               2 MiB  [0:1024][0:1024]\n"));
  EXPECT_THAT(text, HasSubstr("lower bound        32 MiB (moved / bound: 1.00)"));
  EXPECT_THAT(text, HasSubstr("busiest source     4 MiB, at least 4 MiB must (imbalance: 1.00)"));
}

TEST(Plan, ExplainCountsWhatStaysOnARankAsDeliveredNotAsMoved) {
  const std::string text = explain(plan_of("8x8", "f32", "4:S0", "2@0-1:S0"));  // rank 0 keeps its two rows
  EXPECT_THAT(text, HasSubstr("delivered          256 B, 64 B of it local\nmoved              192 B\n"));
}

TEST(Plan, TermsStandBesideTheRoutes) {
  const Plan plan = plan_of("64x64", "bf16", "4:Psum", "tp=2@2-3:S1");
  const std::string text = explain(plan);
  EXPECT_THAT(text, HasSubstr("     0  2                        term              4 KiB  [0:64][0:32]\n"));
  EXPECT_THAT(text, HasSubstr("     2  3                        term              4 KiB  [0:64][32:64]\n"));
  EXPECT_THAT(text, Not(HasSubstr("     2  2                        term")));
  const std::string picture = plan.to_svg();
  EXPECT_THAT(picture, HasSubstr(">0  (8 KiB)<"));  // contributes a term to each owner
  EXPECT_THAT(picture, HasSubstr(">2  (8 KiB)<"));  // contributes one, and keeps its own result
  EXPECT_THAT(picture, HasSubstr("terms to be reduced"));
  EXPECT_THAT(plan_of("64x64", "bf16", "4:S0", "tp=2@4-5:S1").to_svg(), Not(HasSubstr("terms")));
}

TEST(Plan, ExplainStaysShortForManyRanks) {
  const std::string text = explain(plan_of("8192x8192", "bf16", "fsdp=1024:S0", "dp=64,tp=16@1024-2047:R,S1"));
  EXPECT_THAT(text, HasSubstr("... and 16344 more rows"));
  EXPECT_LT(text.size(), 8000U);
  EXPECT_LT(explain(plan_of("8192x8192", "bf16", "256:Psum", "256@256-511:S0")).size(), 16'000U);
}

TEST(Plan, PicturesStaySmallForAThousandRanks) {
  const std::string picture =
      plan_of("8192x8192", "bf16", "dp=16,fsdp=8,tp=8:R,S0*8,S0", "dp=64,tp=16@1024-2047:R,S1").to_svg();
  EXPECT_THAT(picture, StartsWith("<svg "));
  EXPECT_LT(picture.size(), 600'000U);
  EXPECT_LT(plan_of("8192x8192", "bf16", "256:Psum", "256@256-511:S0").to_svg().size(), 600'000U);
}

struct Refusal {
  const char* shape;
  const char* dtype;
  const char* src;
  const char* dst;
  const char* says;
};

TEST(Plan, WhatCannotBePlannedIsRefusedInOneLineThatSaysWhy) {
  const Refusal refusals[] = {
      {"4", "f32", "2:S1", "2:R", "source"},
      {"4", "f32", "2:R", "2:S1", "destination"},
      {"4", "f32", "2:R", "2:Psum", "a transfer cannot choose how"},
      {"4", "i32", "2:Pavg", "2:R", "i32 cannot be reduced by avg"},
      {"4", "bool", "2:Psum", "2:R", "bool cannot be reduced"},
      {"4", "f8_e4m3", "2:Pmax", "2:R", "f8_e4m3 cannot be reduced"},
      {"4", "c64", "2:Pmin", "2:R", "c64 cannot be reduced by min"},
      {"4", "f32", "2,2:Psum,Pmax", "2:R", "one operation"},
      {"6x3", "f4", "2:R", "2:S1", "inside a byte"},
      {"6x5", "f4", "2:S1", "2:R", "at element 3 of dim 1"},
      {"6", "f4", "2:S0", "2:R", "at element 3 of dim 0"},
      {"3x5", "f4", "1:R", "2:R", "ends in the middle of a byte"},
      {"scalar", "f4", "1:R", "2:R", "half a byte"},
      {"1073741824x1073741824", "f32", "2:R", "2:R", "2^56 bytes"},
  };
  for (const Refusal& r : refusals) {
    try {
      plan_of(r.shape, r.dtype, r.src, r.dst);
      ADD_FAILURE() << r.src << " -> " << r.dst;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr(r.says));
      EXPECT_THAT(error.what(), testing::Not(HasSubstr("\n")));
    }
  }
  EXPECT_THROW(redistribute({{4}, DType::kF32}, Layout(), Layout::parse("2:R")), Error);
  EXPECT_THROW(plan_of("4", "f32", "2:R", "2:R", {.hosts = {{0, 1}, {1}}}), Error);
}

TEST(Plan, FourBitRowsOfOddLengthMoveWholeWhereNothingCutsThem) {
  const Plan plan = plan_of("8x3", "f4", "2:S0", "4@2-5:S0");
  EXPECT_EQ(plan.stats.bytes_moved, 12);
  EXPECT_EQ(plan.routes.size(), 4U);
}

TEST(Plan, AnEmptyFourBitTensorIsCutNowhere) {
  EXPECT_THAT(plan_of("4x0x3", "f4", "4:S2", "3@1-3:S1").routes, testing::IsEmpty());
}

}  // namespace
}  // namespace tessera
