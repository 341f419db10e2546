// Tensors that travel quantised from and to ranks with agent daemons: the same as without, except for memory that the
// agent cannot access but would have to read or write.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <random>

#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct WireEnd {
  bool agent = false;
  bool shared = false;  // the tensors' memory
  Mode mode = Mode::kInPlace;

  std::string name() const {
    return fmt::format("{}{}{}", agent ? "Daemon" : "Embedded", shared ? "Shared" : "Private",
                       mode == Mode::kStaged ? "Staged" : "");
  }
};

struct WireAgents {
  WireEnd sender, receiver;

  WireJobs jobs() const {
    return {.sources = 2,
            .destinations = 3,
            .sends = sender.mode,
            .receives = receiver.mode,
            .sender_agents = sender.agent,
            .receiver_agents = receiver.agent};
  }
  std::vector<RandomCase> place(std::vector<RandomCase> cases) const {
    for (RandomCase& a : cases) {
      a.src_shared = sender.shared;
      a.dst_shared = receiver.shared;
    }
    return cases;
  }
  std::string name() const { return sender.name() + "To" + receiver.name(); }
  friend void PrintTo(const WireAgents& agents, std::ostream* out) { *out << agents.name(); }
};

constexpr WireEnd kEmbedded{};
constexpr WireEnd kDaemonPrivate{.agent = true};
constexpr WireEnd kDaemonShared{.agent = true, .shared = true};
constexpr WireEnd kDaemonStaged{.agent = true, .mode = Mode::kStaged};

class WireWithAgents : public testing::TestWithParam<WireAgents> {};

// All formats, and tensors that travel as they are among them.
TEST_P(WireWithAgents, EveryElementIsAsWithoutThem) {
  std::mt19937_64 random(51);
  std::vector<RandomCase> cases;
  for (const Format format : all_formats())
    for (int i = 0; i < 2; ++i)
      cases.push_back(random_wire_case(random, fmt::format("{}.{}", to_string(format), i), 2, 3, format));
  for (int i = 0; i < 4; ++i) cases.push_back(random_case(random, fmt::format("as it is.{}", i), 2, 3));
  expect_all_well(transfer_cases(GetParam().jobs(), GetParam().place(cases)));
}

INSTANTIATE_TEST_SUITE_P(, WireWithAgents,
                         testing::Values(WireAgents{kDaemonShared, kEmbedded}, WireAgents{kDaemonStaged, kEmbedded},
                                         WireAgents{kEmbedded, kDaemonShared}, WireAgents{kEmbedded, kDaemonStaged},
                                         WireAgents{kDaemonShared, kDaemonStaged},
                                         WireAgents{kDaemonStaged, kDaemonShared}),
                         [](const auto& agents) { return agents.param.name(); });

// The results of their reduction are in the agent's own memory.
TEST(WireAgent, TermsInPrivateMemoryAreQuantisedOnceTheyAreReduced) {
  const WireAgents agents{kDaemonPrivate, kEmbedded};
  expect_all_well(
      transfer_cases(agents.jobs(), agents.place({fixed_case(Format::kNvfp4, {40, 64}, "2:Psum", "3:S0")})));
}

class WireRefusal : public testing::TestWithParam<WireAgents> {};

// Each rank of the job with the memory reports it, and the other job learns of it.
TEST_P(WireRefusal, NamesTheTensorAndTheWayOut) {
  const WireAgents& agents = GetParam();
  const std::vector<RandomCase> cases{fixed_case(Format::kMxfp8, {64, 64}, "2:S0", "3:S0")};
  for (const Outcome& outcome : transfer_cases(agents.jobs(), agents.place(cases))) {
    const bool refuses = outcome.name.starts_with("trainer") ? agents.sender.agent : agents.receiver.agent;
    EXPECT_EQ(outcome.status, status_of(ErrorCode::kUnimplemented)) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(
        outcome.output,
        AllOf(HasSubstr("batch policy of pair weights: tensor w is to be quantised to mxfp8, which is not supported"),
              HasSubstr("move them into shared memory, or do without the agent or the wire format")))
        << outcome.name;
    if (!refuses) {
      EXPECT_THAT(outcome.output, HasSubstr(" gave up: ")) << outcome.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, WireRefusal,
                         testing::Values(WireAgents{kDaemonPrivate, kEmbedded}, WireAgents{kEmbedded, kDaemonPrivate}),
                         [](const auto& agents) { return agents.param.name(); });

}  // namespace
}  // namespace tessera::test
