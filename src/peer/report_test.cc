#include "peer/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/framing.h"
#include "base/socket.h"
#include "base/testing.h"
#include "peer/agent.h"
#include "peer/identity.h"
#include "peer/inspection.h"
#include "peer/message_testing.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;

Report full_report() {
  BatchReport batch{.pair = "weights",
                    .id = "policy",
                    .sends = true,
                    .torn = true,
                    .version = 7,
                    .newest = 8,
                    .transfers = 3,
                    .bytes = int64_t{1} << 40,
                    .peers = {{"inference", 2, true}},
                    .operation = "send",
                    .phase = "transfer",
                    .operation_version = 8,
                    .operation_microseconds = 5,
                    .bytes_done = 6,
                    .bytes_total = 7,
                    .waits = {{"inference/1 to take version 8", 9}}};
  return {.release = "0.1.0",
          .name_space = "default",
          .job = "trainer",
          .rank = 3,
          .world = 4,
          .incarnation = Incarnation::self(),
          .commands = {.queued = 2, .capacity = 63},
          .waits = {{"evaluation/0 to join (pair weights)", 10}},
          .batches = {batch, {}}};
}

TEST(ReportTest, ComesBackAsItIsDrawn) {
  expect_conversation_holds<ReportMessages>();
}

TEST(ReportTest, ComesBackAsItWasWrittenAndNothingElseDoes) {
  std::vector<std::byte> bytes = message_bytes(full_report());
  const Report report = parse<Report>(bytes);
  EXPECT_EQ(message_bytes(report), bytes);
  EXPECT_EQ(report.batches.front().waits.front().text, "inference/1 to take version 8");
  EXPECT_EQ(report.commands.queued, 2U);
  EXPECT_EQ(report.commands.capacity, 63U);
  EXPECT_TRUE(report.batches.front().sends && report.batches.front().torn);
  EXPECT_FALSE(report.batches.front().staged || report.batches.front().undecided);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_THROW(parse<Report>(std::span(bytes).first(size)), Error);
  bytes.push_back(std::byte{0});
  EXPECT_THROW(parse<Report>(bytes), Error);
}

TEST(ReportTest, AnotherVersionIsNamed) {
  std::vector<std::byte> bytes = message_bytes(full_report());
  bytes[0] = std::byte{9};
  EXPECT_THAT(error_of([&] { parse<Report>(bytes); }), HasSubstr("version 9, this release reads 1"));
}

TEST(ReportTest, AQueueHoldsNoMoreThanItsCapacity) {
  Report report = full_report();
  report.commands = {.queued = 64, .capacity = 63};
  EXPECT_THROW(parse<Report>(message_bytes(report)), Error);
}

TEST(ReportTest, WhatIsTooMuchIsLeftOutSoThatTheAskerCanReadTheRest) {
  Report report = full_report();
  report.waits.assign(1000, {std::string(5000, 'x'), 1});
  report.batches.resize(5000);
  const Report read = parse<Report>(message_bytes(report));
  EXPECT_EQ(read.waits.size(), 256U);
  EXPECT_EQ(read.waits.front().text.size(), 1024U);
  EXPECT_EQ(read.batches.size(), 4096U);
}

class AskedAgent : public testing::Test {
 protected:
  Agent agent_{{.name_space = "default", .job = "trainer", .rank = 1, .world = 2}, 1};
};

TEST_F(AskedAgent, SaysWhoItIsAndForWhomItWaits) {
  WaitList::Entry entry(agent_.waits());
  entry.set("inference/0 to join (pair weights)");
  const Report report = Inspection(agent_.address(), soon()).answer(soon());
  EXPECT_EQ(report.job, "trainer");
  EXPECT_EQ(report.rank, 1);
  EXPECT_EQ(report.world, 2);
  EXPECT_TRUE(report.incarnation.same_process(Incarnation::self()));
  EXPECT_THAT(report.waits, ElementsAre(Field(&Wait::text, "inference/0 to join (pair weights)")));
}

TEST_F(AskedAgent, ShowsTheCommandQueueThatItIsGiven) {
  const auto queue = [&] { return Inspection(agent_.address(), soon()).answer(soon()).commands; };
  EXPECT_EQ(queue().capacity, 0U) << "embedded";
  agent_.run_on_loop([&] { agent_.set_command_queue([] { return CommandQueueReport{.queued = 3, .capacity = 63}; }); });
  EXPECT_EQ(queue().queued, 3U);
  EXPECT_EQ(queue().capacity, 63U);
  agent_.run_on_loop([&] { agent_.set_command_queue({}); });
  EXPECT_EQ(queue().capacity, 0U);
}

TEST_F(AskedAgent, ManyQuestionsAreAnsweredTogether) {
  std::vector<Inspection> asked;
  for (int i = 0; i < 20; ++i) asked.emplace_back(agent_.address(), soon());
  for (Inspection& one : asked) EXPECT_EQ(one.answer(soon()).job, "trainer");
}

TEST_F(AskedAgent, AQuestionWithSomethingBehindItIsRefused) {
  const UniqueFd socket = connect_unix(agent_.address(), soon());
  ByteWriter out;
  write_fields(Inspect{}, out);
  out.put(uint8_t{0});
  FrameWriter writer(kBusMagic, kProtocolMax, 1024);
  writer.push(kCode<Inspect>, out.view());
  writer.flush(socket.get(), soon());
  FrameReader reader(kBusMagic, {.payload_bytes = kMaxHelloBytes, .fds = 0});
  EXPECT_EQ(wait_frame(socket.get(), reader, soon()).type, kCode<Reject>);
}

}  // namespace
}  // namespace tessera
