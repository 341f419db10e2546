#include "bus/registration/batch_routes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing.h"
#include "exec/walk/route_walk.h"

namespace tessera::bus {
namespace {

TEST(PlanBatch, WhatCannotBePlannedIsNamed) {
  const auto refusal = [](DType dtype, std::string_view src, std::string_view dst) {
    const Shape shape{4, 3};
    Match match;
    for (const char* name : {"good", "bad"})
      match.tensors.push_back({.name = name,
                               .shape = shape,
                               .src_dtype = dtype,
                               .dst_dtype = dtype,
                               .src = Layout::parse(match.tensors.empty() ? "2:R" : src).bind(shape),
                               .dst = Layout::parse(match.tensors.empty() ? "2:R" : dst).bind(shape)});
    return error_of([&] { plan_batch(match, 2, 2, true, 0); });
  };
  EXPECT_THAT(refusal(DType::kF4, "2:S1", "2:R"), testing::StartsWith("tensor bad: f4 of shape 4x3 is cut"));
  EXPECT_THAT(refusal(DType::kI32, "2:Pavg", "2:R"), testing::StartsWith("tensor bad: source: "));
}

TEST(PlanBatch, WireFormatsAreWhatBytesAreCountedIn) {
  const auto bytes = [](std::optional<Format> wire) {
    const Shape shape{256, 64};
    const Match match{.tensors = {{.name = "w",
                                   .shape = shape,
                                   .src_dtype = DType::kBF16,
                                   .dst_dtype = DType::kBF16,
                                   .src = Layout::parse("2:S0").bind(shape),
                                   .dst = Layout::parse("1:R").bind(shape),
                                   .wire = wire}}};
    return plan_batch(match, 2, 1, true, 0).stats.bytes_moved;
  };
  EXPECT_EQ(bytes(std::nullopt), 256 * 64 * 2);
  EXPECT_EQ(bytes(Format::kMxfp8), 256 * 64 * 33 / 32);
}

TEST(PlanBatch, FourBitRoutesThatArePlannedCanBeWalked) {
  const auto layouts = {"4:R", "2:S0", "2:S1", "4@0-3:S1", "2:S2", "3:S0", "2,2:S0,S1", "2,2:S1,S2"};
  int walked = 0;
  for (int i = 0; i < 4 * 4 * 4; ++i) {
    const Shape shape{1 + i / 16, 1 + i / 4 % 4, 1 + i % 4};
    for (const char* src : layouts) {
      for (const char* dst : layouts) {
        const Match match{.tensors = {{.name = "w",
                                       .shape = shape,
                                       .src_dtype = DType::kF4,
                                       .dst_dtype = DType::kF4,
                                       .src = Layout::parse(src).bind(shape),
                                       .dst = Layout::parse(dst).bind(shape)}}};
        BatchRoutes routes;
        if (error_of([&] { routes = plan_batch(match, 4, 4, true, 0); }) != "(no error)") continue;
        for (const auto& links : routes.by_peer) {
          for (const LinkRoute& route : links) {
            const LocalArray array{route.src_owned, byte_strides(DType::kF4, route.src_owned.extents())};
            const Walk walk = make_walk({.shape = shape, .dtype = DType::kF4, .region = route.region},
                                        {.src = &array, .dst_dtype = DType::kF4, .image = true}, Walk::Order::kFree);
            EXPECT_EQ(2 * walk.atoms(), route.region.size());
            ++walked;
          }
        }
      }
    }
  }
  EXPECT_GT(walked, 1000);
}

}  // namespace
}  // namespace tessera::bus
