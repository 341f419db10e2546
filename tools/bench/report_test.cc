#include "tools/bench/report.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

namespace tessera::bench {
namespace {

using testing::DoubleNear;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kGigabyte = 1'000'000'000;

// In this report the streaming copy runs at 10 GB/s.
Report report_of(std::vector<CaseResult> cases) {
  return {.machine = {},
          .cpus = {2, 5},
          .bytes = kGigabyte,
          .repeat = 1,
          .streaming_copy = {0.1},
          .process_vm_readv = {},
          .cases = std::move(cases),
          .crowds = {},
          .deaths = {}};
}

CaseResult result_of(const Case& what, double seconds) {
  return {.what = what,
          .status = {},
          .times = {.bytes_moved = kGigabyte, .seconds = {seconds}},
          .ceiling = what.memory == Memory::kShared ? std::vector{0.1} : std::vector<double>{}};
}

const Case kShared{.name = "shared", .memory = Memory::kShared, .target = 0.5};
const Case kPrivate{.name = "private", .memory = Memory::kPrivate, .target = 0.5};
const Case kSmall{.name = "small", .baseline = "shared", .target = 0.3, .register_target_s = 0.5};

nlohmann::json case_json(const Report& report, size_t index) {
  return nlohmann::json::parse(to_json(report)).at("cases").at(index);
}

TEST(BenchReport, RatesAreOfTheMedianAndTheExtremes) {
  const Rate odd = rate_of(kGigabyte, {4, 1, 2});
  EXPECT_DOUBLE_EQ(odd.median, 0.5);
  EXPECT_DOUBLE_EQ(odd.least, 0.25);
  EXPECT_DOUBLE_EQ(odd.most, 1);
  EXPECT_DOUBLE_EQ(rate_of(kGigabyte, {1, 3}).median, 0.5);
}

TEST(BenchReport, AShareIsOfTheCeilingOfThatMemoryAndHeldAgainstTheTarget) {
  const Report report = report_of({result_of(kShared, 0.125), result_of(kShared, 0.25)});
  EXPECT_EQ(case_json(report, 0).at("share_of"), "streaming_copy");
  EXPECT_THAT(case_json(report, 0).at("share").get<double>(), DoubleNear(0.8, 1e-9));
  EXPECT_EQ(case_json(report, 0).at("met"), true);
  EXPECT_EQ(case_json(report, 1).at("met"), false);
  EXPECT_THAT(to_table(report), HasSubstr("0.80    0.50  met\n"));
  EXPECT_THAT(to_table(report), HasSubstr("0.40    0.50  MISSED\n"));
}

TEST(BenchReport, SmallTensorsAreComparedWithTheirBaseline) {
  const Report report = report_of({result_of(kShared, 0.1), result_of(kSmall, 0.25)});
  EXPECT_EQ(case_json(report, 1).at("share_of"), "shared");
  EXPECT_THAT(case_json(report, 1).at("share").get<double>(), DoubleNear(0.4, 1e-9));
  EXPECT_EQ(case_json(report, 1).at("register_met"), true);
}

TEST(BenchReport, ASampledCaseIsComparedWithTheTransfersBetweenItsOwn) {
  CaseResult sampled = result_of({.name = "sampled", .beside_plain = true, .target = 0.9}, 0.25);
  sampled.times.plain_seconds = {0.1, 0.2, 0.3};
  const Report report = report_of({sampled});
  EXPECT_EQ(case_json(report, 0).at("share_of"), "the same without digests");
  EXPECT_THAT(case_json(report, 0).at("share").get<double>(), DoubleNear(0.8, 1e-9));
  EXPECT_EQ(case_json(report, 0).at("plain_seconds").size(), 3);
  EXPECT_EQ(case_json(report, 0).at("met"), false);
}

TEST(BenchReport, ACaseIsHeldAgainstThePaceOfItsOwnTime) {
  CaseResult slow = result_of(kShared, 0.25), small = result_of(kSmall, 0.25);
  slow.ceiling = {0.3, 0.2, 0.1};  // the machine runs at half speed
  small.ceiling = {0.1};
  const Report report = report_of({slow, small});
  EXPECT_THAT(case_json(report, 0).at("share").get<double>(), DoubleNear(0.8, 1e-9));
  EXPECT_THAT(case_json(report, 0).at("ceiling_gigabytes_per_second").at("median").get<double>(), DoubleNear(5, 1e-9));
  EXPECT_THAT(case_json(report, 1).at("share").get<double>(), DoubleNear(0.5, 1e-9));
}

TEST(BenchReport, AVerdictThatCannotBeGivenIsSaidToBeUnknown) {
  const CaseResult failed{.what = kShared, .status = Status(ErrorCode::kPeerLost, "gone"), .times = {}};
  const Report report = report_of({failed, result_of(kSmall, 0.25), result_of(kPrivate, 0.25)});
  EXPECT_EQ(case_json(report, 0).at("error"), "gone");
  for (const size_t unknown : {size_t{1}, size_t{2}}) {
    EXPECT_TRUE(case_json(report, unknown).at("share").is_null());
    EXPECT_TRUE(case_json(report, unknown).at("met").is_null());
  }
  EXPECT_THAT(to_table(report), HasSubstr("0.30  unknown without shared;"));
  EXPECT_THAT(to_table(report), HasSubstr("0.50  unknown without process_vm_readv\n"));
  EXPECT_EQ(report.status().code(), ErrorCode::kPeerLost);
}

TEST(BenchReport, ACrowdIsComparedWithTheFirst) {
  const auto [eight, more] = all_crowds();
  Report report = report_of({});
  report.crowds = {{.crowd = eight, .status = {}, .times = {.cpu_seconds = {0.02, 0.01, 0.03}, .seconds = {1, 1, 1}}},
                   {.crowd = more, .status = {}, .times = {.cpu_seconds = {0.03}, .seconds = {2}}}};
  EXPECT_THAT(to_table(report), HasSubstr("1.50    1.50  met\n"));
  report.crowds[1].times.cpu_seconds = {0.05};
  EXPECT_THAT(to_table(report), HasSubstr("2.50    1.50  MISSED\n"));
  EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("crowds").at(1).at("met"), false);
  report.crowds.erase(report.crowds.begin());
  EXPECT_FALSE(nlohmann::json::parse(to_json(report)).at("crowds").at(0).contains("met"));
}

TEST(BenchReport, SaysOnWhichCpusAndWhichCasesNobodyAskedFor) {
  Case baseline = kShared;
  EXPECT_THAT(to_table(report_of({result_of(baseline, 0.1)})), Not(HasSubstr("only since")));
  baseline.only_baseline = true;
  const Report report = report_of({result_of(baseline, 0.1)});
  EXPECT_THAT(to_table(report), HasSubstr("on CPUs 2 and 5;"));
  EXPECT_THAT(to_table(report), HasSubstr("met; only because another case is compared with it\n"));
  EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("pinned_to_cpus"), (std::vector{2, 5}));
  EXPECT_EQ(case_json(report, 0).at("only_baseline"), true);
}

}  // namespace
}  // namespace tessera::bench
