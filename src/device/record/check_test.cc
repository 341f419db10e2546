// Logs of one rank.
#include <gtest/gtest.h>

#include <string>

#include "device/record/answers_testing.h"

namespace tessera::device {
namespace {

const Answer kOneRank[] = {
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

const Answer kHosts[] = {
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

class AnswersOfOneRank : public testing::TestWithParam<Answer> {};

TEST_P(AnswersOfOneRank, AreKnown) {
  expect_answer(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Streams, AnswersOfOneRank, testing::ValuesIn(kOneRank),
                         [](const auto& test) { return std::string(test.param.name); });
INSTANTIATE_TEST_SUITE_P(Hosts, AnswersOfOneRank, testing::ValuesIn(kHosts),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tessera::device
