// Logs that contradict themselves or each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "base/testing.h"
#include "device/record/check.h"
#include "device/record/logs_testing.h"
#include "device/record/order.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

TEST(LogsOfOneRun, AreNeeded) {
  EXPECT_EQ(error_of([] { check_schedule({}); }), "no logs to check");
}

TEST(LogsOfOneRun, AreOfAllRanks) {
  std::vector<RankLog> logs;
  logs.emplace_back(LogHead{.run = 7, .rank = 1, .ranks = 4});
  logs.emplace_back(LogHead{.run = 7, .rank = 3, .ranks = 4});
  EXPECT_EQ(error_of([&] { check_schedule(logs); }),
            "mismatch: the log of rank 0, 2 is missing: those of all 4 ranks are checked together");
}

TEST(LogsOfOneRun, HaveOneEach) {
  std::vector<RankLog> logs;
  logs.emplace_back(LogHead{.run = 7, .rank = 1, .ranks = 2});
  logs.emplace_back(LogHead{.run = 7, .rank = 1, .ranks = 2});
  EXPECT_EQ(error_of([&] { check_schedule(logs); }), "mismatch: two logs are of rank 1");
}

TEST(LogsOfOneRun, AreNotMixed) {
  std::vector<RankLog> logs;
  logs.emplace_back(LogHead{.run = 0xabc, .rank = 0, .ranks = 2});
  logs.emplace_back(LogHead{.run = 0xabd, .rank = 1, .ranks = 2});
  EXPECT_EQ(
      error_of([&] { check_schedule(logs); }),
      "mismatch: the logs of rank 0 (run 0000000000000abc, 2 ranks) and of rank 1 (run 0000000000000abd, 2 ranks) "
      "are of different runs");
}

TEST(LogsOfOneRun, HaveLimitedStreams) {
  HandLogs logs(1);
  for (size_t i = 0; i < ScheduleOrder::kMostActors; ++i) logs.stream(0, "s");
  EXPECT_EQ(error_of([&] { check_schedule(logs.all()); }),
            "logs of 4097 hosts and streams: at most 4096 can be checked");
}

struct FaultCase {
  const char* name;
  int ranks;
  std::function<void(HandLogs&)> write;
  const char* fault;
};

void PrintTo(const FaultCase& c, std::ostream* out) {
  *out << c.name;
}

const FaultCase kFaults[] = {
    {"AnUnknownStream", 1, [](HandLogs& logs) { logs.operation({0, 9}, "x", {}); },
     "rank 0: record 2 is of stream 9, which its log does not name"},
    {"AnEventThatIsNotRecorded", 1,
     [](HandLogs& logs) {
       logs.record(logs.stream(0, "a"));
       logs.wait(logs.stream(0, "b"), 2);
     },
     "rank 0: record 5: stream b of rank 0 waits for event 2, which its log does not record"},
    {"NoEventAtAll", 1, [](HandLogs& logs) { logs.wait(HandLogs::host(0), 1); },
     "rank 0: record 2: the host of rank 0 waits for event 1, which its log does not record"},
    {"AnEventRecordedTwice", 1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       for (int i = 0; i < 2; ++i) logs.add(a, {.kind = RecordKind::kEventRecord, .event = 3});
     },
     "rank 0: record 4 records event 3 a second time"},
    {"AWordThatIsNotWritten", 2, [](HandLogs& logs) { logs.see(0, {1, 5, 7}); },
     "rank 0: record 3: the host of rank 0 waits for word 5 of rank 1 >= 7, which is not written in that rank's log"},
    {"AWordThatDoesNotReachTheValue", 2,
     [](HandLogs& logs) {
       logs.set(1, 5, 6);
       logs.operation(logs.stream(0, "s"), "x", {}, {{1, 5, 7}});
     },
     "rank 0: record 5: stream s of rank 0 waits for word 5 of rank 1 >= 7, which reaches 6 in that rank's log"},
    {"AWordOfARankThatThereIsNot", 1, [](HandLogs& logs) { logs.see(0, {9, 5, 7}); },
     "waits for word 5 of rank 9 >= 7, which is not written in that rank's log"},
    {"AWordOfACutLog", 2,
     [](HandLogs& logs) {
       logs[1].set_torn_bytes(33);
       logs.see(0, {1, 5, 7});
     },
     "is not written in that rank's log (of which the last 33 B were not written whole)"},
    {"AWordThatShrinks", 1,
     [](HandLogs& logs) {
       logs.set(0, 5, 6);
       logs.set(0, 5, 4);
     },
     "rank 0: record 3 sets word 5 to 4, after 6: words only grow"},
    {"AWordOfTwoStreams", 1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "x", {}, {}, {{0, 5, 6}});
       logs.operation(logs.stream(0, "b"), "y", {}, {}, {{0, 5, 7}});
     },
     "rank 0: record 5 sets word 5 to 7, and nothing orders it after the write of 6"},
    {"AnotherRanksWord", 2, [](HandLogs& logs) { logs.operation(logs.stream(0, "a"), "x", {}, {}, {{1, 5, 6}}); },
     "rank 0: record 4 writes word 5 of rank 1, which only that rank may"},
    {"ACollectiveThatARankLacks", 3,
     [](HandLogs& logs) {
       logs.collective(0, 4);
       logs.collective(2, 4);
     },
     "rank 0: record 4: collective 4 of group etp (barrier) takes 3 ranks, and is in the logs of 2 only: rank 0, 2"},
    {"CollectivesOfOtherNames", 2,
     [](HandLogs& logs) {
       logs.collective(0, 4, "barrier");
       logs.collective(1, 4, "exchange");
     },
     "collective 4 of group etp is barrier of 2 ranks at rank 0, and exchange of 2 ranks at rank 1"},
    {"CollectivesOfOtherSizes", 2,
     [](HandLogs& logs) {
       logs.collective(0, 4, "barrier", "etp", 2);
       logs.collective(1, 4, "barrier", "etp", 1);
     },
     "collective 4 of group etp is barrier of 2 ranks at rank 0, and barrier of 1 ranks at rank 1"},
    {"ACollectiveTwice", 1,
     [](HandLogs& logs) {
       logs.collective(0, 4);
       logs.collective(0, 4);
     },
     "rank 0: record 3 is collective 4 of group etp a second time"},
    {"ACollectiveWithOneRankMore", 3,
     [](HandLogs& logs) {
       for (const int rank : {0, 1, 2}) logs.collective(rank, 4, "barrier", "pair", 2);
     },
     "collective 4 of group pair takes 2 ranks, and rank 2 is one more"},
    {"CollectivesInAnotherOrder", 2,
     [](HandLogs& logs) {
       logs.collective(0, 1);
       logs.collective(0, 2);
       logs.collective(1, 2);
       logs.collective(1, 1);
     },
     "the logs wait in a circle: the host of rank 0 in record 3 (collective), the host of rank 1 in record 3 "
     "(collective)"},
    {"ACircleOfWords", 2,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "x", {}, {{1, 5, 1}}, {{0, 5, 1}});
       logs.operation(logs.stream(1, "b"), "y", {}, {{0, 5, 1}}, {{1, 5, 1}});
     },
     "the logs wait in a circle: stream a of rank 0 in record 4 (operation), stream b of rank 1 in record 4 "
     "(operation)"},
    {"AnOperationOutOfOrder", 1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       for (const uint64_t number : {2, 1})
         logs.add(a, {.kind = RecordKind::kOperation, .operation = number, .name = "x"});
     },
     "rank 0: record 4 is operation 1 of stream a of rank 0, after operation 2"},
    {"AWaitOfAnOperationThatThereIsNot", 1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.set(0, 5, 1);
       logs.add(a, {.kind = RecordKind::kOperation, .operation = 1, .name = "x"});
       logs.begins(a, 2, {{0, 5, 1}});
       logs.add(a, {.kind = RecordKind::kOperation, .operation = 3, .name = "y"});
     },
     "rank 0: record 5 waits for operation 2 of stream a of rank 0, which its log does not have"},
    {"MemoryBehindARegion", 1,
     [](HandLogs& logs) { logs.access(0, "x", {reads(0, HandLogs::kRegionBytes - 1, HandLogs::kRegionBytes + 1)}); },
     "rank 0: record 2 accesses bytes 1048575 to 1048577 of region 1 of rank 0, which has 1048576"},
    {"AnUnknownRegion", 1,
     [](HandLogs& logs) {
       RecordedAccess access = reads(0, 0, 64);
       access.region.number = 4;
       logs.access(0, "x", {access});
     },
     "rank 0: record 2 accesses bytes 0 to 64 of region 4 of rank 0, which has 0"},
    {"BytesThatAreNoRange", 1,
     [](HandLogs& logs) { logs.access(0, "x", {{.region = {}, .offset = UINT64_MAX, .bytes = 2}}); },
     "rank 0: record 2 accesses 2 B from byte 18446744073709551615 on: no range"},
};

class Faults : public testing::TestWithParam<FaultCase> {};

TEST_P(Faults, AreNamed) {
  HandLogs logs(GetParam().ranks);
  GetParam().write(logs);
  const CheckReport report = check_schedule(logs.all());
  ASSERT_THAT(report.faults, testing::Not(IsEmpty()));
  EXPECT_THAT(report.faults[0], HasSubstr(GetParam().fault));
  EXPECT_FALSE(report.ok());
}

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::ValuesIn(kFaults),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(FaultyLogs, AreCheckedAsFarAsTheyGo) {
  HandLogs logs(2);
  const auto a = logs.stream(0, "a");
  logs.operation(a, "fill", {writes(0, 0, 64)});
  logs.access(0, "look", {reads(0, 0, 64)});
  logs.see(0, {1, 5, 7});
  logs.access(0, "look later", {reads(0, 0, 64)});
  const CheckReport report = check_schedule(logs.all());
  EXPECT_THAT(report.faults, SizeIs(1));
  ASSERT_THAT(report.conflicts, SizeIs(1));
  EXPECT_EQ(report.conflicts[0].second.operation, "look");
  EXPECT_EQ(report.unreached, 2u);
}

TEST(FaultyLogs, HaveALimitedNumberOfFaults) {
  HandLogs logs(1);
  for (uint64_t value = 1000; value > 0; --value) logs.set(0, 5, value);
  EXPECT_THAT(check_schedule(logs.all()).faults, SizeIs(ScheduleOrder::kMostFaults));
}

TEST(UnfinishedOperations, AreNoFaultAndNotAccessed) {
  HandLogs logs(2);
  const auto gather = logs.stream(1, "gather");
  const auto compute = logs.stream(1, "compute");
  logs.operation(logs.stream(0, "publish"), "publish", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
  logs.enqueue(gather, "gather", {reads(0, 0, 64)}, 1);  // killed before it saw the word
  logs.wait(compute, logs.record(gather));
  logs.operation(compute, "gemm", {});
  const CheckReport report = check_schedule(logs.all());
  EXPECT_TRUE(report.ok());
  EXPECT_THAT(report.unfinished,
              ElementsAre("stream gather of rank 1: operation 1 (gather ) had not begun when the recording ended"));
  EXPECT_EQ(report.unreached, 4u);
}

TEST(Recordings, MayBeginAfterOperationsAndEvents) {
  HandLogs logs(1);
  const auto a = logs.stream(0, "a");
  logs.set(0, 5, 1);
  logs.begins(a, 6, {{0, 5, 1}});
  logs.add(a, {.kind = RecordKind::kOperation, .operation = 7, .name = "x"});
  logs.add(a, {.kind = RecordKind::kEventRecord, .event = 4});
  logs.wait(HandLogs::host(0), 3);
  EXPECT_THAT(check_schedule(logs.all()).faults, IsEmpty());
}

}  // namespace
}  // namespace tessera::device
