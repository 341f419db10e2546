// Logs of several ranks, which words and collectives order.
#include <gtest/gtest.h>

#include <string>

#include "device/record/answers_testing.h"

namespace tessera::device {
namespace {

const Answer kSeveralRanks[] = {
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
    {"WhatAnOperationTurnsOutToReadIsOrderedByTheWordThatSaysSo",
     2,
     [](HandLogs& logs) {
       const auto reduce = logs.stream(1, "reduce");
       logs.access(0, "wgrad", {writes(0, 0, 64)});
       logs.set(0, 5, 1);
       const uint64_t fold = logs.enqueue(reduce, "fold", {writes(1, 0, 64)}, 1, {{1, 6, 1}});
       logs.access(1, "meanwhile", {writes(1, 64, 128)});
       logs.accesses(reduce, fold, "fold", {reads(0, 0, 64)});
       logs.begins(reduce, fold, {{0, 5, 1}});
       logs.see(0, {1, 6, 1});
       logs.access(0, "wgrad again", {writes(0, 0, 64)});
     },
     {}},
    {"WhatAnOperationTurnsOutToReadIsWrittenTooEarly",
     2,
     [](HandLogs& logs) {
       const auto reduce = logs.stream(1, "reduce");
       logs.access(0, "wgrad", {writes(0, 0, 64)});
       logs.set(0, 5, 1);
       const uint64_t fold = logs.enqueue(reduce, "fold", {writes(1, 0, 64)}, 1, {{1, 6, 1}});
       logs.accesses(reduce, fold, "fold", {reads(0, 0, 64, 1)});
       logs.begins(reduce, fold, {{0, 5, 1}});
       logs.access(0, "wgrad again", {writes(0, 0, 64, 2)});
     },
     {"fold / wgrad again"}},
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

class AnswersOfRanks : public testing::TestWithParam<Answer> {};

TEST_P(AnswersOfRanks, AreKnown) {
  expect_answer(GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, AnswersOfRanks, testing::ValuesIn(kSeveralRanks),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tessera::device
