// What is said of a conflict.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "device/record/answers_testing.h"
#include "device/record/check.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Conflict, SaysWhoWhereAndWhichEventIsNotAwaited) {
  HandLogs logs(1);
  const auto a = logs.stream(0, "gather");
  const auto b = logs.stream(0, "compute");
  logs.operation(a, "fill", {writes(0, 64, 256, 3)});
  logs.record(a);
  logs.operation(b, "use", {reads(0, 0, 128, 3)});
  const CheckReport report = check_schedule(logs.all());
  ASSERT_EQ(report.conflicts.size(), 1u);
  EXPECT_EQ(
      report.conflicts[0].to_string(),
      "bytes 64 to 128 of region heap of rank 0:\n"
      "  writes fill in record 4 of stream gather of rank 0, version 3\n"
      "  reads use in record 6 of stream compute of rank 0, version 3\n"
      "  missing: no event of stream gather of rank 0 from event 1 (record 5) on is waited for by stream compute of "
      "rank 0 before use (record 6)");
}

std::string missing_of(HandLogs& logs) {
  const CheckReport report = check_schedule(logs.all());
  EXPECT_EQ(report.conflicts.size(), 1u);
  return report.conflicts.empty() ? "" : report.conflicts[0].missing;
}

TEST(Conflict, SaysThatNoEventIsRecorded) {
  HandLogs logs(1);
  logs.operation(logs.stream(0, "a"), "fill", {writes(0, 0, 64)});
  logs.access(0, "look", {reads(0, 0, 64)});
  EXPECT_EQ(missing_of(logs),
            "stream a of rank 0 records no event after fill (record 3), for which the host of rank 0 "
            "before look (record 4) could wait");
}

TEST(Conflict, NamesTheWordThatIsNotAwaited) {
  HandLogs logs(2);
  const auto publish = logs.stream(0, "publish");
  logs.operation(publish, "publish", {writes(0, 0, 64, 1)}, {}, {{0, 5, 7}});
  logs.operation(publish, "later", {}, {}, {{0, 5, 8}});
  logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64, 1)});
  EXPECT_EQ(missing_of(logs),
            "rank 0's word 5 >= 7, which publish (record 4) sets, is not waited for by stream gather of "
            "rank 1 before gather (record 4)");
}

TEST(Conflict, NamesTheWordThatAnotherStreamSetsAfterwards) {
  HandLogs logs(2);
  const auto publish = logs.stream(0, "publish");
  const auto signal = logs.stream(0, "signal");
  logs.operation(signal, "too early", {}, {}, {{0, 5, 6}});
  logs.operation(publish, "publish", {writes(0, 0, 64, 1)});
  logs.wait(signal, logs.record(publish));
  logs.operation(signal, "signal", {}, {}, {{0, 5, 7}});
  logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64, 1)}, {{0, 5, 6}});
  EXPECT_THAT(missing_of(logs), HasSubstr("rank 0's word 5 >= 7, which signal (record 9) sets, is not waited for"));
}

TEST(Conflict, OfAReadAndALaterVersionLacksTheEdgeFromTheRead) {
  HandLogs logs(2);
  logs.operation(logs.stream(0, "publish"), "publish", {writes(0, 0, 64, 2)});
  logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64, 1)}, {}, {{1, 9, 1}});
  const CheckReport report = check_schedule(logs.all());
  EXPECT_THAT(names_of(report), ElementsAre("gather / publish"));
  EXPECT_THAT(missing_of(logs), HasSubstr("rank 1's word 9 >= 1, which gather (record 4) sets, is not waited for by "
                                          "stream publish of rank 0"));
}

TEST(Conflict, SaysThatNoWordIsWritten) {
  HandLogs logs(2);
  logs.operation(logs.stream(0, "publish"), "publish", {writes(0, 0, 64)});
  logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64)});
  EXPECT_THAT(missing_of(logs), HasSubstr("rank 0 writes no word after publish (record 4)"));
}

TEST(Conflict, CountIsLimited) {
  HandLogs logs(1);
  const auto a = logs.stream(0, "a");
  const auto b = logs.stream(0, "b");
  for (int i = 0; i < 10; ++i) {
    logs.operation(a, "left", {writes(0, 0, 64)});
    logs.operation(b, "right", {writes(0, 0, 64)});
  }
  EXPECT_EQ(check_schedule(logs.all()).conflicts.size(), 100u);
  EXPECT_FALSE(check_schedule(logs.all(), {.most_conflicts = 100}).more);
  const CheckReport report = check_schedule(logs.all(), {.most_conflicts = 99});
  EXPECT_EQ(report.conflicts.size(), 99u);
  EXPECT_TRUE(report.more);
}

TEST(Conflict, NamesAreSafeToPrint) {
  HandLogs logs(1);
  logs.operation(logs.stream(0, "\x1b[2J"), "a\nb", {writes(0, 0, 64)});
  logs.access(0, "look", {reads(0, 0, 64)});
  const std::string text = check_schedule(logs.all()).conflicts.at(0).to_string();
  EXPECT_THAT(text, HasSubstr("a\\x0ab in record 3 of stream \\x1b[2J"));
}

}  // namespace
}  // namespace tessera::device
