#include "command/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

struct Replies final : ReplySink {
  void reply(uint64_t id, const CommandOutcome& outcome) override {
    texts.push_back(std::to_string(id) + " " +
                    (outcome.status.ok() ? std::to_string(outcome.result.size()) + " bytes"
                                         : std::string(to_string(outcome.status.code()))));
  }
  std::vector<std::string> texts;
};

CommandOutcome result(size_t bytes) {
  return {.status = {}, .result = std::vector<std::byte>(bytes)};
}

TEST(CommandLog, ACommandThatComesAgainIsAnsweredAsBefore) {
  CommandLog log(1);
  const auto first = std::make_shared<Replies>();
  const auto second = std::make_shared<Replies>();
  EXPECT_TRUE(log.begin(5, first));
  EXPECT_FALSE(log.begin(5, second)) << "it is being executed";
  EXPECT_EQ(log.running(), 1u);
  EXPECT_THAT(second->texts, IsEmpty());
  log.finish(5, result(3));
  EXPECT_THAT(first->texts, ElementsAre("5 3 bytes"));
  EXPECT_THAT(second->texts, ElementsAre("5 3 bytes"));
  EXPECT_FALSE(log.begin(5, second)) << "it was executed";
  EXPECT_THAT(second->texts, ElementsAre("5 3 bytes", "5 3 bytes"));
  EXPECT_EQ(log.running(), 0u);
}

TEST(CommandLog, WhatIsForgottenIsNotExecutedAgain) {
  CommandLog log(1, 2);
  const auto replies = std::make_shared<Replies>();
  EXPECT_TRUE(log.begin(1, replies));  // runs for a long time
  for (uint64_t id = 2; id <= 6; ++id) {
    EXPECT_TRUE(log.begin(id, replies));
    log.finish(id, result(id));
  }
  replies->texts.clear();
  EXPECT_FALSE(log.begin(4, replies));
  EXPECT_FALSE(log.begin(5, replies));
  EXPECT_FALSE(log.begin(1, replies));
  EXPECT_THAT(replies->texts, ElementsAre("4 not-found", "5 5 bytes"));
  log.finish(1, result(1));  // the last to end is the last to be forgotten, however low its id
  EXPECT_FALSE(log.begin(1, replies));
  EXPECT_FALSE(log.begin(5, replies));
  EXPECT_THAT(replies->texts,
              ElementsAre("4 not-found", "5 5 bytes", "1 1 bytes", "1 1 bytes", "1 1 bytes", "5 not-found"));
}

TEST(CommandLog, AnIdThatNeverCameIsExecutedInWhateverOrder) {
  CommandLog log(1);
  const auto replies = std::make_shared<Replies>();
  EXPECT_TRUE(log.begin(9, replies));
  log.finish(9, result(0));
  EXPECT_TRUE(log.begin(8, replies));
  log.finish(8, result(0));
}

TEST(CommandLog, AnOutcomeWhoseQueueIsGoneIsKeptForTheNext) {
  CommandLog log(1);
  auto gone = std::make_shared<Replies>();
  EXPECT_TRUE(log.begin(1, gone));
  gone.reset();
  log.finish(1, result(2));
  const auto next = std::make_shared<Replies>();
  EXPECT_FALSE(log.begin(1, next));
  EXPECT_THAT(next->texts, ElementsAre("1 2 bytes"));
}

TEST(CommandLog, CommandsThatRunAreBounded) {
  CommandLog log(1);
  const auto replies = std::make_shared<Replies>();
  for (uint64_t id = 1; id <= CommandLog::kMostRunning; ++id) ASSERT_TRUE(log.begin(id, replies));
  EXPECT_FALSE(log.begin(5000, replies));
  EXPECT_THAT(replies->texts, ElementsAre("5000 resource-exhausted"));
  log.finish(1, result(0));
  EXPECT_TRUE(log.begin(5000, replies));
}

TEST(CommandLog, OutcomesTravelInReplies) {
  const auto travel = [](const CommandOutcome& outcome) {
    Record record;
    std::vector<std::byte> payload;
    record.head.type = write_outcome(outcome, payload);
    record.bytes = static_cast<uint16_t>(payload.size());
    std::ranges::copy(payload, record.data.begin());
    return read_outcome(record);
  };
  EXPECT_EQ(travel(result(0)), result(0));
  EXPECT_EQ(travel(result(kMaxRecordPayload)), result(kMaxRecordPayload));
  const CommandOutcome refused{.status = Status(ErrorCode::kNotFound, "no batch"), .result = {}};
  EXPECT_EQ(travel(refused), refused);
  const CommandOutcome verbose{.status = Status(ErrorCode::kInternal, std::string(5000, 'x')), .result = {}};
  EXPECT_EQ(travel(verbose).status.message(), std::string(kMaxRecordPayload - 1, 'x'));
}

TEST(CommandLog, RepliesThatNoAgentWritesAreRefused) {
  for (const auto& [type, payload] : {std::pair<int, std::string>{0, ""},
                                      {3, ""},
                                      {2, ""},
                                      {2, std::string(1, '\0')},
                                      {2, "\x0e"},
                                      {2, "\xff"},
                                      {77, "text"}}) {
    Record record;
    record.head.type = static_cast<uint16_t>(type);
    record.bytes = static_cast<uint16_t>(payload.size());
    std::ranges::copy(std::as_bytes(std::span(payload)), record.data.begin());
    EXPECT_THROW(read_outcome(record), Error) << type << " " << payload;
  }
}

}  // namespace
}  // namespace tessera
