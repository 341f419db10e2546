#include "device/record/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "base/testing.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// --- logs with known answers -----------------------------------------------------------------------

struct Case {
  const char* name;
  int ranks;
  std::function<void(HandLogs&)> write;
  std::vector<std::string> conflicts;  // "first / second", by their names
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

std::vector<std::string> names_of(const CheckReport& report) {
  std::vector<std::string> names;
  for (const Conflict& conflict : report.conflicts)
    names.push_back(conflict.first.operation + " / " + conflict.second.operation);
  return names;
}

const Case kOneRank[] = {
    {"TwoStreamsThatOnlyRead",
     1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "left", {reads(0, 0, 64)});
       logs.operation(logs.stream(0, "b"), "right", {reads(0, 0, 64)});
     },
     {}},
    {"AWriteAndAReadOnTwoStreams",
     1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "fill", {writes(0, 0, 64)});
       logs.operation(logs.stream(0, "b"), "use", {reads(0, 0, 64)});
     },
     {"fill / use"}},
    {"AReadAndAWriteOnTwoStreams",
     1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "use", {reads(0, 0, 64)});
       logs.operation(logs.stream(0, "b"), "fill", {writes(0, 0, 64)});
     },
     {"use / fill"}},
    {"TwoWritesOnTwoStreams",
     1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "one", {writes(0, 0, 64)});
       logs.operation(logs.stream(0, "b"), "two", {writes(0, 0, 64)});
     },
     {"one / two"}},
    {"OneStreamIsInOrder",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.operation(a, "use", {reads(0, 0, 64)});
       logs.operation(a, "refill", {writes(0, 0, 64)});
     },
     {}},
    {"AnOperationMayReadWhatItWrites",
     1,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "a"), "fold", {reads(0, 0, 64), writes(0, 0, 64), writes(0, 32, 96)});
     },
     {}},
    {"AnEventBetweenTwoStreams",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.wait(b, logs.record(a));
       logs.operation(b, "use", {reads(0, 0, 64)});
     },
     {}},
    {"AnEventRecordedTooEarly",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       const uint64_t event = logs.record(a);
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.wait(b, event);
       logs.operation(b, "use", {reads(0, 0, 64)});
     },
     {"fill / use"}},
    {"AnEventWaitedForTooLate",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       const uint64_t event = logs.record(a);
       logs.operation(b, "use", {reads(0, 0, 64)});
       logs.wait(b, event);
       logs.operation(b, "use later", {reads(0, 0, 64)});
     },
     {"fill / use"}},
    {"AnEventWaitedForByAnotherStream",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       const auto c = logs.stream(0, "c");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.wait(c, logs.record(a));
       logs.operation(b, "use", {reads(0, 0, 64)});
     },
     {"fill / use"}},
    {"EventsThroughAThirdStream",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       const auto c = logs.stream(0, "c");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.wait(b, logs.record(a));
       logs.wait(c, logs.record(b));
       logs.operation(c, "use", {reads(0, 0, 64)});
     },
     {}},
    {"AMissingWriteAfterReadEdge",
     1,
     [](HandLogs& logs) {
       const auto gather = logs.stream(0, "gather");
       const auto compute = logs.stream(0, "compute");
       logs.operation(gather, "gather 1", {writes(0, 0, 64)});
       logs.wait(compute, logs.record(gather));
       logs.operation(compute, "gemm 1", {reads(0, 0, 64)});
       logs.operation(gather, "gather 2", {writes(0, 0, 64)});  // into the same buffer
       logs.wait(compute, logs.record(gather));
       logs.operation(compute, "gemm 2", {reads(0, 0, 64)});
     },
     {"gemm 1 / gather 2"}},
    {"AWriteAfterReadEdge",
     1,
     [](HandLogs& logs) {
       const auto gather = logs.stream(0, "gather");
       const auto compute = logs.stream(0, "compute");
       for (int step = 0; step < 3; ++step) {
         logs.operation(gather, "gather", {writes(0, 0, 64)});
         logs.wait(compute, logs.record(gather));
         logs.operation(compute, "gemm", {reads(0, 0, 64)});
         logs.wait(gather, logs.record(compute));
       }
     },
     {}},
    {"TwoBuffersInTurnsNeedOneEdgeLess",
     1,
     [](HandLogs& logs) {
       const auto gather = logs.stream(0, "gather");
       const auto compute = logs.stream(0, "compute");
       uint64_t used[2] = {0, 0};
       for (uint64_t step = 0; step < 6; ++step) {
         const uint64_t at = step % 2 * 64;
         if (step >= 2) logs.wait(gather, used[step % 2]);
         logs.operation(gather, "gather", {writes(0, at, at + 64)});
         logs.wait(compute, logs.record(gather));
         logs.operation(compute, "gemm", {reads(0, at, at + 64)});
         used[step % 2] = logs.record(compute);
       }
     },
     {}},
    {"ABufferReusedAtAnotherOffset",
     1,
     [](HandLogs& logs) {
       const auto gather = logs.stream(0, "gather");
       const auto compute = logs.stream(0, "compute");
       logs.operation(compute, "gemm", {reads(0, 0, 64)});
       logs.operation(gather, "behind", {writes(0, 64, 128)});
       logs.operation(gather, "one byte too early", {writes(0, 63, 127)});
     },
     {"gemm / one byte too early"}},
    {"APieceOfALargeWrite",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "fill", {writes(0, 0, 1024)});
       logs.operation(b, "first half", {reads(0, 0, 512)});
       logs.wait(b, logs.record(a));
       logs.operation(b, "second half", {reads(0, 512, 1024)});
     },
     {"fill / first half"}},
    {"WritesOfRowsAndAReadOfAll",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       const auto c = logs.stream(0, "c");
       logs.operation(a, "rows 0", {writes(0, 0, 32)});
       logs.operation(b, "rows 1", {writes(0, 32, 64)});
       logs.wait(c, logs.record(a));
       logs.operation(c, "use", {reads(0, 0, 64)});
     },
     {"rows 1 / use"}},
    {"AllConflictsOfAReadAreFound",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "first", {writes(0, 0, 64)});
       logs.operation(a, "second", {writes(0, 0, 64)});
       logs.operation(a, "elsewhere", {writes(0, 64, 96)});
       logs.operation(b, "use", {reads(0, 0, 64)});
     },
     {"first / use", "second / use"}},
    {"ManyReadersAndAWriter",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       const auto c = logs.stream(0, "c");
       logs.operation(a, "read a", {reads(0, 0, 64)});
       logs.operation(b, "read b", {reads(0, 0, 64)});
       logs.wait(c, logs.record(a));
       logs.operation(c, "write", {writes(0, 0, 64)});
     },
     {"read b / write"}},
    {"ReplaysWithAnEdgeInEach",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       for (int replay = 0; replay < 3; ++replay) {
         logs.wait(a, logs.record(b));
         logs.operation(a, "fill", {writes(0, 0, 64)});
         logs.wait(b, logs.record(a));
         logs.operation(b, "use", {reads(0, 0, 64)});
       }
     },
     {}},
    {"ReplaysThatOverlap",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       for (const char* replay : {"1", "2"}) {
         logs.operation(a, std::string("fill ") + replay, {writes(0, 0, 64)});
         logs.wait(b, logs.record(a));
         logs.operation(b, std::string("use ") + replay, {reads(0, 0, 64)});
       }
     },
     {"use 1 / fill 2"}},
};

const Case kHosts[] = {
    {"TheHostBeforeWhatItEnqueues",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.access(0, "prepare", {writes(0, 0, 64)});
       logs.operation(a, "use", {reads(0, 0, 64)});
     },
     {}},
    {"TheHostAfterWhatItEnqueued",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.operation(a, "use", {reads(0, 0, 64)});
       logs.access(0, "update", {writes(0, 0, 64)});
     },
     {"use / update"}},
    {"TheHostWaitsForAnEvent",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.operation(a, "use", {reads(0, 0, 64)});
       logs.wait(HandLogs::host(0), logs.record(a));
       logs.access(0, "update", {writes(0, 0, 64)});
     },
     {}},
    {"TheHostWaitsForAnEarlierEvent",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const uint64_t event = logs.record(a);
       logs.operation(a, "use", {reads(0, 0, 64)});
       logs.wait(HandLogs::host(0), event);
       logs.access(0, "update", {writes(0, 0, 64)});
     },
     {"use / update"}},
    {"TheHostOrdersTwoStreams",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.wait(HandLogs::host(0), logs.record(a));
       logs.operation(b, "use", {reads(0, 0, 64)});
     },
     {}},
    {"WhatWasEnqueuedBeforeTheHostWaited",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       const auto b = logs.stream(0, "b");
       logs.operation(a, "fill", {writes(0, 0, 64)});
       logs.operation(b, "use", {reads(0, 0, 64)});
       logs.wait(HandLogs::host(0), logs.record(a));
       logs.operation(b, "use again", {reads(0, 0, 64)});
     },
     {"fill / use"}},
    {"AnInlineStreamIsTheHost",
     1,
     [](HandLogs& logs) {
       const auto a = logs.stream(0, "a");
       logs.operation(HandLogs::host(0), "inline fill", {writes(0, 0, 64)});
       logs.operation(a, "use", {reads(0, 0, 64)});
       logs.operation(HandLogs::host(0), "inline refill", {writes(0, 0, 64)});
     },
     {"use / inline refill"}},
};

const Case kSeveralRanks[] = {
    {"AnotherRankReadsWithoutAWord",
     2,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "publish"), "publish", {writes(0, 0, 64)});
       logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64)});
     },
     {"publish / gather"}},
    {"AnotherRanksMemoryOfTheSameNumber",
     2,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "publish"), "publish", {writes(0, 0, 64)});
       logs.operation(logs.stream(1, "publish"), "publish", {writes(1, 0, 64)});
     },
     {}},
    {"PrivateMemoryAtTheSameAddress",
     2,
     [](HandLogs& logs) {
       for (const int rank : {0, 1}) {
         RecordedAccess access = writes(rank, 4096, 8192);
         access.region.number = RegionId::kPrivate;
         logs.operation(logs.stream(rank, "s"), "write", {access});
       }
     },
     {}},
    {"AWordOrdersTwoRanks",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "publish", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.operation(gather, "gather", {reads(0, 0, 64)}, {{0, 5, 1}});
     },
     {}},
    {"AWordIsSetBeforeItsData",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "signal", {}, {}, {{0, 5, 1}});
       logs.operation(publish, "publish", {writes(0, 0, 64)});
       logs.operation(gather, "gather", {reads(0, 0, 64)}, {{0, 5, 1}});
     },
     {"publish / gather"}},
    {"AWordOfAnotherSlot",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "other", {}, {}, {{0, 6, 1}});
       logs.operation(publish, "publish", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.operation(gather, "gather", {reads(0, 0, 64)}, {{0, 6, 1}});
     },
     {"publish / gather"}},
    {"AWaitForTheVersionBefore",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "publish 1", {writes(0, 0, 64, 1)}, {}, {{0, 5, 1}});
       logs.operation(publish, "publish 2", {writes(0, 0, 64, 2)}, {}, {{0, 5, 2}});
       logs.operation(gather, "gather", {reads(0, 0, 64, 2)}, {{0, 5, 1}});
     },
     {"publish 2 / gather"}},
    {"AWaitTakesTheFirstHighEnoughValue",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "publish 1", {writes(0, 0, 64, 1)}, {}, {{0, 5, 10}});
       logs.operation(publish, "publish 2", {writes(0, 64, 128, 2)}, {}, {{0, 5, 20}});
       logs.operation(gather, "gather", {reads(0, 0, 128, 2)}, {{0, 5, 7}});
     },
     {"publish 2 / gather"}},
    {"RetireIsAwaitedBeforeTheNextPublication",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       for (uint64_t version = 1; version < 4; ++version) {
         logs.operation(publish, "publish", {writes(0, 0, 64, version)}, {{1, 9, version - 1}}, {{0, 5, version}});
         logs.operation(gather, "gather", {reads(0, 0, 64, version)}, {{0, 5, version}});
         if (version == 1) logs.set(1, 9, 0);
         logs.wait(HandLogs::host(1), logs.record(gather));
         logs.set(1, 9, version);
       }
     },
     {}},
    {"RetireIsNotAwaited",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "publish 1", {writes(0, 0, 64, 1)}, {}, {{0, 5, 1}});
       logs.operation(gather, "gather 1", {reads(0, 0, 64, 1)}, {{0, 5, 1}}, {{1, 9, 1}});
       logs.operation(publish, "publish 2", {writes(0, 0, 64, 2)}, {}, {{0, 5, 2}});
     },
     {"gather 1 / publish 2"}},
    {"RetireIsSetBeforeTheGatherHasRun",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       logs.operation(publish, "publish 1", {writes(0, 0, 64, 1)}, {}, {{0, 5, 1}});
       logs.operation(gather, "gather 1", {reads(0, 0, 64, 1)}, {{0, 5, 1}});
       logs.set(1, 9, 1);  // by the host, which has not waited
       logs.operation(publish, "publish 2", {writes(0, 0, 64, 2)}, {{1, 9, 1}}, {{0, 5, 2}});
     },
     {"gather 1 / publish 2"}},
    {"AHostSeesAWord",
     2,
     [](HandLogs& logs) {
       logs.access(0, "update", {writes(0, 0, 64)});
       logs.set(0, 5, 1);
       logs.see(1, {0, 5, 1});
       logs.operation(logs.stream(1, "gather"), "gather", {reads(0, 0, 64)});
     },
     {}},
    {"OneOfTwoOwnersIsNotAwaited",
     3,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "publish"), "publish 0", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.operation(logs.stream(1, "publish"), "publish 1", {writes(1, 0, 64)}, {}, {{1, 5, 1}});
       logs.operation(logs.stream(2, "gather"), "gather", {reads(0, 0, 64), reads(1, 0, 64)}, {{0, 5, 1}});
     },
     {"publish 1 / gather"}},
    {"WordsThroughAThirdRank",
     3,
     [](HandLogs& logs) {
       const auto middle = logs.stream(1, "relay");
       logs.operation(logs.stream(0, "a"), "write", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.operation(middle, "relay", {}, {{0, 5, 1}}, {{1, 6, 1}});
       logs.operation(logs.stream(2, "c"), "read", {reads(0, 0, 64)}, {{1, 6, 1}});
     },
     {}},
    {"TheThirdRankDoesNotWaitItself",
     3,
     [](HandLogs& logs) {
       const auto middle = logs.stream(1, "relay");
       logs.operation(logs.stream(0, "a"), "write", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.operation(middle, "relay", {}, {}, {{1, 6, 1}});
       logs.operation(middle, "too late", {}, {{0, 5, 1}});
       logs.operation(logs.stream(2, "c"), "read", {reads(0, 0, 64)}, {{1, 6, 1}});
     },
     {"write / read"}},
    {"WhatIsEnqueuedWhileAnOperationWaits",
     2,
     [](HandLogs& logs) {
       const auto publish = logs.stream(0, "publish");
       const auto gather = logs.stream(1, "gather");
       const auto compute = logs.stream(1, "compute");
       const uint64_t number = logs.enqueue(gather, "gather", {reads(0, 0, 64), writes(1, 0, 64)}, 1);
       logs.wait(compute, logs.record(gather));
       logs.operation(compute, "gemm", {reads(1, 0, 64)});
       logs.access(1, "too early", {reads(1, 0, 64)});
       logs.operation(publish, "publish", {writes(0, 0, 64)}, {}, {{0, 5, 1}});
       logs.begins(gather, number, {{0, 5, 1}});
     },
     {"gather / too early"}},
    {"ACollectiveOrdersAllHosts",
     3,
     [](HandLogs& logs) {
       logs.access(0, "prepare", {writes(0, 0, 64)});
       logs.collective_of_all(1);
       logs.access(1, "look", {reads(0, 0, 64)});
       logs.operation(logs.stream(2, "s"), "use", {reads(0, 0, 64)});
     },
     {}},
    {"ACollectiveDoesNotOrderStreams",
     2,
     [](HandLogs& logs) {
       logs.operation(logs.stream(0, "s"), "fill", {writes(0, 0, 64)});
       logs.collective_of_all(1);
       logs.access(1, "look", {reads(0, 0, 64)});
     },
     {"fill / look"}},
    {"WhatComesAfterACollectiveIsNotOrderedByIt",
     2,
     [](HandLogs& logs) {
       logs.collective_of_all(1);
       logs.access(0, "write", {writes(0, 0, 64, 1)});
       logs.access(1, "look", {reads(0, 0, 64, 1)});
       logs.collective_of_all(2);
     },
     {"write / look"}},
    {"ACollectiveOfSomeRanks",
     3,
     [](HandLogs& logs) {
       logs.access(0, "write", {writes(0, 0, 64)});
       logs.collective(0, 1, "barrier", "pair", 2);
       logs.collective(1, 1, "barrier", "pair", 2);
       logs.access(1, "look", {reads(0, 0, 64)});
       logs.access(2, "look from outside", {reads(0, 0, 64)});
     },
     {"write / look from outside"}},
};

class Answers : public testing::TestWithParam<Case> {};

TEST_P(Answers, AreKnown) {
  HandLogs logs(GetParam().ranks);
  GetParam().write(logs);
  CheckReport report = check_schedule(logs.all());
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_THAT(report.unfinished, IsEmpty());
  EXPECT_EQ(report.unreached, 0u);
  EXPECT_EQ(names_of(report), GetParam().conflicts);
  for (const Conflict& conflict : report.conflicts) EXPECT_FALSE(conflict.missing.empty());
}

TEST_P(Answers, DoNotDependOnTheOrderOfTheLogs) {
  HandLogs logs(GetParam().ranks);
  GetParam().write(logs);
  std::ranges::reverse(logs.all());
  EXPECT_THAT(names_of(check_schedule(logs.all())), testing::UnorderedElementsAreArray(GetParam().conflicts));
}

const auto kNameOfCase = [](const auto& test) { return std::string(test.param.name); };
INSTANTIATE_TEST_SUITE_P(OneRank, Answers, testing::ValuesIn(kOneRank), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Hosts, Answers, testing::ValuesIn(kHosts), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(SeveralRanks, Answers, testing::ValuesIn(kSeveralRanks), kNameOfCase);

// --- what is said of a conflict --------------------------------------------------------------------

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
