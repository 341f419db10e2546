#include "device/record/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "base/testing.h"
#include "device/record/logs_testing.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Timeline, DrawsEveryOperationWhoseTimesAreKnown) {
  HandLogs logs(2);
  const auto gather = logs.stream(0, "gather");
  const auto idle = logs.stream(0, "idle");
  const auto compute = logs.stream(1, "compute");
  const uint64_t first =
      logs.operation(gather, "gather \"wte\"", {reads(1, 0, 64), writes(0, 0, 128), writes(0, 256, 260)});
  logs.operation(idle, "never ran", {});
  logs.operation(HandLogs::host(1), "inline", {});
  logs.ran(HandLogs::host(1), 0, 5'000'000'007, 5'000'002'007);
  const uint64_t second = logs.operation(compute, "gemm", {});
  logs.ran(compute, second, 5'000'001'000, 5'000'001'000);
  logs.ran(gather, first, 5'000'000'000, 5'000'001'234);
  std::ostringstream out;
  const TimelineFigures figures = write_timeline(logs.all(), out);
  EXPECT_EQ(figures.operations, 3u);
  EXPECT_EQ(figures.streams, 3u);
  EXPECT_EQ(out.str(), R"({"displayTimeUnit":"ns","traceEvents":[
{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"rank 0"}},
{"ph":"M","name":"thread_name","pid":0,"tid":1,"args":{"name":"gather"}},
{"ph":"X","cat":"etp","name":"gather \"wte\"","pid":0,"tid":1,"ts":0.000,"dur":1.234,"args":{"subject":"","record":5,"read":64,"written":132}},
{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"rank 1"}},
{"ph":"M","name":"thread_name","pid":1,"tid":0,"args":{"name":"host"}},
{"ph":"M","name":"thread_name","pid":1,"tid":3,"args":{"name":"compute"}},
{"ph":"X","cat":"etp","name":"inline","pid":1,"tid":0,"ts":0.007,"dur":2.000,"args":{"subject":"","record":4,"read":0,"written":0}},
{"ph":"X","cat":"etp","name":"gemm","pid":1,"tid":3,"ts":1.000,"dur":0.000,"args":{"subject":"","record":6,"read":0,"written":0}}
],"otherData":{"zero_ns":"5000000000"}}
)");
}

TEST(Timeline, LeavesOutWhatWasGivenBeforeTheRecordingAndTimesThatGoBackwards) {
  HandLogs logs(1);
  const auto a = logs.stream(0, "a");
  logs.ran(a, 1, 10, 20);
  const uint64_t shown = logs.operation(a, "shown", {});
  const uint64_t backwards = logs.operation(a, "backwards", {});
  logs.ran(a, shown, 10, 20);
  logs.ran(a, backwards, INT64_MAX, INT64_MIN);
  std::ostringstream out;
  EXPECT_EQ(write_timeline(logs.all(), out).operations, 1u);
  EXPECT_THAT(out.str(), Not(HasSubstr("backwards")));
}

TEST(Timeline, TakesTheLogsOfSomeRanks) {
  HandLogs logs(3);
  const auto a = logs.stream(1, "a");
  logs.ran(a, logs.operation(a, "x", {}), INT64_MIN, INT64_MAX);
  std::ostringstream out;
  EXPECT_EQ(write_timeline(std::span(logs.all()).subspan(1, 1), out).operations, 1u);
  EXPECT_THAT(out.str(), HasSubstr("\"ts\":0.000,\"dur\":18446744073709551.615"));
}

TEST(Timeline, NeedsTimes) {
  HandLogs logs(1);
  logs.operation(logs.stream(0, "a"), "x", {});
  std::ostringstream out;
  EXPECT_EQ(error_of([&] { write_timeline(logs.all(), out); }),
            "not-found: no log tells when an operation ran: nothing to draw");
  EXPECT_EQ(out.str(), "");
}

TEST(Timeline, RefusesLogsThatDoNotBelongTogether) {
  std::vector<RankLog> logs;
  logs.emplace_back(LogHead{.run = 1, .rank = 0, .ranks = 2});
  logs.emplace_back(LogHead{.run = 2, .rank = 1, .ranks = 2});
  std::ostringstream out;
  EXPECT_EQ(error_of([&] { write_timeline(logs, out); }),
            "mismatch: the logs of rank 0 and rank 1 are of different runs");
  logs[1] = RankLog(logs[0].head());
  EXPECT_EQ(error_of([&] { write_timeline(logs, out); }), "mismatch: two logs are of rank 0");
}

}  // namespace
}  // namespace tessera::device
