#include "tools/top/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace tessera::tools {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

// A trainer's rank that was asked, and an inference job's on another machine.
TopLook look(int64_t bytes, double at) {
  TopRank asked{.job = "trainer", .world = 2, .state = TopRank::State::kSeen};
  asked.incarnation.pid = 4711;
  BatchReport batch{.pair = "weights", .id = "policy", .sends = true, .version = 7, .bytes = bytes};
  batch.peers.push_back({"inference", 2, true});
  batch.operation = "send";
  batch.phase = "wait for receivers";
  batch.operation_version = 8;
  batch.waits.push_back({"inference/1 to take version 8", 2'500'000});
  asked.report.batches.push_back(batch);
  TopRank away{.job = "inference", .rank = 1, .world = 2, .state = TopRank::State::kElsewhere};
  return {.store = "tcp://h:1",
          .name_space = "default",
          .when = TimePoint(seconds(at)),
          .ranks = {away, asked},
          .pairs = {{"weights", "trainer", "inference", 1, 2}}};
}

TEST(TopView, SaysWhoWaitsForWhomAndHowFast) {
  const TopLook before = look(1'000'000'000, 10);
  const std::string text = top_text(look(4'000'000'000, 12), &before);
  EXPECT_THAT(text, HasSubstr("2 ranks of 2 jobs"));
  EXPECT_THAT(text, HasSubstr("pair weights: 1 of 2 ranks of trainer have joined, with inference"));
  EXPECT_THAT(text, HasSubstr("waits for inference/1 to take version 8, 2.5 s"));
  EXPECT_THAT(text, HasSubstr("1.50 GB/s"));
  EXPECT_THAT(text, HasSubstr("send of 8: wait for receivers"));
  EXPECT_THAT(text, HasSubstr("elsewhere"));
}

TEST(TopView, ThereIsNoRateWithoutAnEarlierLookAtTheSameProcess) {
  EXPECT_THAT(top_text(look(4'000'000'000, 12), nullptr), Not(HasSubstr("B/s")));
  TopLook before = look(1'000'000'000, 10);
  before.ranks.back().incarnation.nonce = 1;
  EXPECT_THAT(top_text(look(4'000'000'000, 12), &before), Not(HasSubstr("B/s")));
  const json shown = json::parse(top_json(look(4'000'000'000, 12), &before));
  EXPECT_TRUE(shown["ranks"][1]["batches"][0]["bytes_per_second"].is_null());
}

TEST(TopView, JsonHoldsAllOfIt) {
  const TopLook before = look(1'000'000'000, 10);
  const json shown = json::parse(top_json(look(4'000'000'000, 12), &before));
  const json& rank = shown["ranks"][1];
  EXPECT_EQ(rank["state"], "seen");
  EXPECT_EQ(rank["pid"], 4711);
  const json& batch = rank["batches"][0];
  EXPECT_EQ(batch["bytes_per_second"], 1.5e9);
  EXPECT_EQ(batch["operation"]["version"], 8);
  EXPECT_EQ(batch["waits"][0]["for"], "inference/1 to take version 8");
  EXPECT_EQ(batch["waits"][0]["seconds"], 2.5);
  EXPECT_EQ(shown["pairs"][0]["world"], 2);
}

TEST(TopView, AStoppedProcessIsNamed) {
  TopLook now = look(0, 1);
  now.ranks.back().state = TopRank::State::kStopped;
  now.ranks.back().why = "continue it (kill -CONT 4711) or end it";
  EXPECT_THAT(top_text(now, nullptr), HasSubstr("stopped (pid 4711): continue it (kill -CONT 4711) or end it"));
  EXPECT_EQ(json::parse(top_json(now, nullptr))["ranks"][1]["state"], "stopped");
}

TEST(TopView, TheCommandQueueOfADaemonIsShown) {
  TopLook now = look(0, 1);
  EXPECT_THAT(top_text(now, nullptr), Not(HasSubstr("command queue")));
  EXPECT_TRUE(json::parse(top_json(now, nullptr))["ranks"][1]["command_queue"].is_null());
  now.ranks.back().report.commands = {.queued = 3, .capacity = 63};
  EXPECT_THAT(top_text(now, nullptr), HasSubstr("command queue of its agent: 3 of 63"));
  EXPECT_EQ(json::parse(top_json(now, nullptr))["ranks"][1]["command_queue"], (json{{"queued", 3}, {"capacity", 63}}));
}

TEST(TopView, WhatOthersSayLeavesTheTerminalAlone) {
  TopLook now = look(0, 1);
  now.ranks.back().report.batches.front().waits.front().text = "\x1b[2J\nnobody";
  const std::string text = top_text(now, nullptr);
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  EXPECT_THAT(text, HasSubstr("\\x1b[2J\\x0anobody"));
}

}  // namespace
}  // namespace tessera::tools
