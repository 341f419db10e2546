// Random tensors between two jobs of real processes, in private and in shared memory: every element of every rank, bit
// for bit.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <ostream>
#include <random>

#include "tests/support/fixture.h"
#include "tests/support/random_case.h"

namespace tessera::test {
namespace {

struct Jobs {
  int sources;
  int destinations;
  uint64_t seed;
  const char* pull;  // TESSERA_FORCE_PULL: how private memory is read
  const char* agent = "embedded";

  friend void PrintTo(const Jobs& jobs, std::ostream* out) {
    *out << "seed " << jobs.seed << " " << jobs.pull << " " << jobs.agent;
  }
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 6;  // a tenth of the lot
#else
constexpr int kCases = 60;
#endif
constexpr int64_t kVersions = 2;

std::vector<RandomCase> cases_of(const Jobs& jobs) {
  std::mt19937_64 random(jobs.seed);
  std::vector<RandomCase> cases;
  for (int i = 0; i < kCases; ++i)
    cases.push_back(random_case(random, "t" + std::to_string(i), jobs.sources, jobs.destinations));
  return cases;
}

TensorSpec spec_of(const RandomCase& a, LocalData& data, DType dtype, const Layout& layout) {
  return {.name = a.name,
          .data = data.bytes().data() + data.offset,
          .dtype = dtype,
          .shape = a.shape,
          .layout = layout,
          .strides = data.strides};
}

int send_all(const Jobs& jobs, const std::string& store, Rank rank) {
  const std::vector<RandomCase> cases = cases_of(jobs);
  Bus bus({.job = "trainer", .rank = rank, .world = jobs.sources, .store = store, .agent = jobs.agent, .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "inference"});
  std::vector<LocalData> data;
  for (const RandomCase& a : cases) data.push_back(source_space(a, rank));
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < cases.size(); ++i)
    specs.push_back(spec_of(cases[i], data[i], cases[i].src_dtype, cases[i].src));
  Batch batch = pair.offer("policy", specs);
  for (int64_t version = 1; version <= kVersions; ++version) {
    for (size_t i = 0; i < cases.size(); ++i) fill_source(cases[i], rank, version, data[i]);
    batch.send(version).wait();
  }
  return 0;
}

int receive_all(const Jobs& jobs, const std::string& store, Rank rank) {
  ::setenv("TESSERA_FORCE_PULL", jobs.pull, 1);
  const std::vector<RandomCase> cases = cases_of(jobs);
  Bus bus({.job = "inference",
           .rank = rank,
           .world = jobs.destinations,
           .store = store,
           .agent = jobs.agent,
           .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
  std::vector<LocalData> data;
  for (const RandomCase& a : cases) data.push_back(destination_space(a, rank));
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < cases.size(); ++i)
    specs.push_back(spec_of(cases[i], data[i], cases[i].dst_dtype, cases[i].dst));
  Batch batch = pair.accept("policy", specs);
  for (int64_t version = 1; version <= kVersions; ++version) {
    if (batch.recv(version).wait() != version) return 2;
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string wrong = check_destination(cases[i], rank, version, data[i]);
      if (wrong.empty()) continue;
      std::fprintf(stderr, "version %ld: %s\n", static_cast<long>(version), wrong.c_str());
      return 3;
    }
  }
  return 0;
}

class RandomLayouts : public JobsTest, public testing::WithParamInterface<Jobs> {};

TEST_P(RandomLayouts, EveryElementArrives) {
  const Jobs jobs = GetParam();
  if (jobs.agent == std::string("daemon")) {
    for (Rank rank = 0; rank < jobs.sources; ++rank) start_agent("trainer", rank);
    for (Rank rank = 0; rank < jobs.destinations; ++rank) start_agent("inference", rank, jobs.pull);
  }
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    start("trainer/" + std::to_string(rank), [=, this] { return send_all(jobs, store_, rank); });
  for (Rank rank = 0; rank < jobs.destinations; ++rank)
    start("inference/" + std::to_string(rank), [=, this] { return receive_all(jobs, store_, rank); });
  expect_all_well(6 * hang_limit());
}

INSTANTIATE_TEST_SUITE_P(Jobs, RandomLayouts,
                         testing::Values(Jobs{1, 1, 11, ""}, Jobs{2, 3, 12, "stream"}, Jobs{4, 2, 13, "readv"},
                                         Jobs{3, 4, 14, ""}, Jobs{6, 1, 15, "stream"}, Jobs{4, 4, 16, "readv"},
                                         Jobs{2, 3, 17, "", "daemon"}, Jobs{3, 1, 18, "", "daemon"}),
                         [](const auto& jobs) {
                           return std::to_string(jobs.param.sources) + "To" + std::to_string(jobs.param.destinations) +
                                  jobs.param.agent;
                         });

}  // namespace
}  // namespace tessera::test
