// Deltas between jobs of real processes: every element of every rank is the same as without deltas, bit for bit,
// whatever a receiver has missed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <ostream>
#include <random>

#include "tests/multiproc/delta_jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// --- random layouts ------------------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 7;
#else
constexpr int kCases = 42;
#endif
constexpr double kChances[] = {0.01, 0, 1e-4, 0.3, 1, 0.05};
constexpr int64_t kVersions = 1 + static_cast<int64_t>(std::size(kChances));

// Every dtype, some of them cast, reduced or quantised; the chances of change for each version, each starting with a
// different one.
std::vector<RandomCase> random_cases(const DeltaJobs& jobs, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RandomCase> cases;
  for (int i = 0; i < kCases; ++i) {
    const std::string name = "t" + std::to_string(i);
    const Format format = all_formats()[static_cast<size_t>(i) % all_formats().size()];
    cases.push_back(i % 6 == 5 ? random_wire_case(random, name, jobs.sources, jobs.destinations, format)
                               : random_case(random, name, jobs.sources, jobs.destinations));
    for (size_t c = 0; c < std::size(kChances); ++c)
      cases.back().chances.push_back(kChances[(c + static_cast<size_t>(i)) % std::size(kChances)]);
  }
  return cases;
}

struct RandomJobs {
  DeltaJobs jobs;
  uint64_t seed;

  friend void PrintTo(const RandomJobs& random, std::ostream* out) { *out << "seed " << random.seed; }
};

class RandomDeltas : public Deltas, public testing::WithParamInterface<RandomJobs> {};

// All take every version: each waits for the others.
TEST_P(RandomDeltas, EveryElementIsWhatItWouldBeWithout) {
  jobs_ = GetParam().jobs;
  cases_ = random_cases(jobs_, GetParam().seed);
  Shared<std::atomic<int64_t>> sent, received;
  if (jobs_.agent == std::string("daemon")) {
    for (Rank rank = 0; rank < jobs_.sources; ++rank) start_agent("trainer", rank);
    for (Rank rank = 0; rank < jobs_.destinations; ++rank) start_agent("inference", rank);
  }
  std::vector<Barrier> steps(kVersions);  // which agents need not pass
  start_all(
      [&](Member& member) {
        for (int64_t version = 1; version <= kVersions; ++version) {
          member.send(version).wait();
          steps[static_cast<size_t>(version - 1)].pass();
        }
        member.batch().wait_peers(1, kVersions, kPatience);  // staged, send() is done before the receivers are
        *sent += member.stats().delta_routes;
        return 0;
      },
      [&](Member& member) {
        for (int64_t version = 1; version <= kVersions; ++version) {
          REQUIRE_HERE(member.batch().recv(version).wait() == version);
          if (!member.holds(version)) return kWrong;
          steps[static_cast<size_t>(version - 1)].pass();
        }
        const BatchStats stats = member.stats();
        REQUIRE_HERE(stats.delta_bytes < stats.delta_full_bytes || stats.delta_routes == 0);
        *received += stats.delta_routes;
        return 0;
      });
  for (Barrier& step : steps) step.open();
  expect_success();
  EXPECT_EQ(sent->load(), received->load());
  EXPECT_GT(received->load(), kCases);
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomDeltas,
    testing::Values(RandomJobs{{}, 41}, RandomJobs{{.sources = 2, .destinations = 3}, 42},
                    RandomJobs{{.sources = 4, .destinations = 2, .pull = "stream"}, 43},
                    RandomJobs{{.sources = 3, .destinations = 4, .staged = true}, 44},
                    RandomJobs{{.sources = 2, .destinations = 1, .staged = true, .digest = false}, 45},
                    RandomJobs{{.sources = 2, .destinations = 2, .staged = true, .agent = "daemon"}, 47},
                    RandomJobs{{.sources = 6, .destinations = 1, .digest = false, .pull = "readv"}, 46}),
    [](const auto& random) {
      const DeltaJobs& jobs = random.param.jobs;
      return std::to_string(jobs.sources) + "To" + std::to_string(jobs.destinations) + (jobs.staged ? "Staged" : "") +
             (jobs.agent == std::string("daemon") ? "WithAgents" : "") + (jobs.digest ? "" : "WithoutDigests");
    });

// --- what a receiver has missed ------------------------------------------------------------------

// Takes `version` and finds how many routes came as deltas.
int64_t deltas_of(Member& member, int64_t version) {
  const int64_t before = member.stats().delta_routes;
  if (member.batch().recv(version, kPatience).wait() != version) return -1;
  return member.stats().delta_routes - before;
}

TEST_F(Deltas, AVersionThatAReceiverHasMissedMakesTheNextOneTravelInFull) {
  jobs_ = {.sources = 2, .destinations = 2, .staged = true};
  cases_ = {rows_to_columns()};
  std::vector<Barrier> steps(4);
  start_all(
      [&](Member& member) {
        for (const int64_t version : {1, 2, 3, 4}) {
          member.send(version).wait();
          if (version != 2) steps[static_cast<size_t>(version - 1)].pass();
        }
        return 0;
      },
      [&](Member& member) {
        for (const int64_t version : {1, 3, 4}) {
          const int64_t deltas = deltas_of(member, version);
          REQUIRE_HERE(deltas == (version == 4 ? 2 : 0));
          if (!member.holds(version)) return kWrong;
          steps[static_cast<size_t>(version - 1)].pass();
        }
        return 0;
      });
  for (Barrier& step : steps) step.open();
  expect_success();
}

// Sent again with other contents: what the receivers hold is neither.
TEST_F(Deltas, AVersionThatFailedIsSentAgainInFull) {
  jobs_ = {.sources = 2, .destinations = 2};
  cases_ = {rows_to_columns()};
  Barrier failed;
  start_all(
      [&](Member& member) {
        member.send(1).wait();
        const bool sent = went_well([&] { member.send(2, 2, std::chrono::milliseconds(300)).wait(); });
        REQUIRE_HERE(!sent);
        failed.pass();
        member.send(2, 3).wait();
        member.send(3, 4).wait();
        return 0;
      },
      [&](Member& member) {
        REQUIRE_HERE(deltas_of(member, 1) == 0 && member.holds(1));
        failed.pass();
        REQUIRE_HERE(deltas_of(member, 2) == 0);
        if (!member.holds(3)) return kWrong;
        REQUIRE_HERE(deltas_of(member, 3) == 2);
        return member.holds(4) ? 0 : kWrong;
      });
  failed.open();
  expect_success();
}

TEST_F(Deltas, AVersionThatWasWithdrawnIsNotBuiltUpon) {
  jobs_ = {.sources = 1, .destinations = 1, .staged = true};
  cases_ = {small_changes()};
  std::vector<Barrier> steps(3);
  start_all(
      [&](Member& member) {
        member.send(1).wait();
        steps[0].pass();
        Handle second = member.send(2);
        second.wait();
        REQUIRE_HERE(second.withdraw());
        member.send(3).wait();
        steps[1].pass();
        member.send(4).wait();
        steps[2].pass();
        return 0;
      },
      [&](Member& member) {
        REQUIRE_HERE(deltas_of(member, 1) == 0);
        steps[0].pass();
        REQUIRE_HERE(deltas_of(member, 3) == 0 && member.holds(3));
        steps[1].pass();
        REQUIRE_HERE(deltas_of(member, 4) == 1);
        if (!member.holds(4)) return kWrong;
        steps[2].pass();
        return 0;
      });
  for (Barrier& step : steps) step.open();
  expect_success();
}

// A new process of the same rank starts without anything, and so does a new session.
TEST_F(Deltas, AReceiverThatComesBackTakesAllOfItOnce) {
  jobs_ = {.sources = 1, .destinations = 1};
  cases_ = {small_changes()};
  start_member(true, 0, [&](Member& member) {
    int64_t version = 0;
    while (member.stats().sessions < 2 || version % 2 != 0) {
      ++version;
      while (!went_well([&] { member.send(version).wait(); })) {
      }
    }
    member.send(++version).wait();
    member.send(++version).wait();
    return 0;
  });
  const pid_t first = start_member(false, 0, [&](Member& member) {
    REQUIRE_HERE(deltas_of(member, 1) == 0);
    REQUIRE_HERE(deltas_of(member, 2) == 1 && member.holds(2));
    return ::raise(SIGKILL);
  });
  start("inference/0, again", [&] {
    await_end(first);
    Member member(jobs_, cases_, store_, false, 0);
    const int64_t version = member.batch().recv({}, kPatience).wait();
    REQUIRE_HERE(member.stats().delta_routes == 0 && member.holds(version));
    REQUIRE_HERE(deltas_of(member, version + 1) == 1);
    REQUIRE_HERE(member.holds(version + 1));
    for (int64_t next = version + 2; went_well([&] { member.batch().recv(next, kAttempt).wait(); }); ++next)
      REQUIRE_HERE(member.holds(next));
    return 0;
  });
  EXPECT_EQ(of(first).status, -SIGKILL) << of(first).output;
  expect_success();
}

// A job that comes when a staged version is already there takes that in full, and deltas from then on.
TEST_F(Deltas, AStagedVersionThatIsThereIsTakenInFull) {
  jobs_ = {.sources = 1, .destinations = 1, .staged = true};
  cases_ = {small_changes()};
  std::vector<Barrier> steps(3);
  const auto receiver = [&](const std::string& job, bool late) {
    start(job, [&, job, late] {
      std::vector<RandomCase> cases = cases_;
      Bus bus({.job = job, .store = store_, .threads = 1});
      Pair pair = bus.pair({.name = "weights", .peer = "trainer"});
      LocalData data = destination_space(cases[0], 0);
      const TensorSpec spec{.name = "w",
                            .data = data.bytes().data() + data.offset,
                            .shape = cases[0].shape,
                            .layout = cases[0].dst,
                            .strides = data.strides};
      if (late) steps[0].pass();
      Batch batch = pair.accept("policy", {&spec, 1}, kRendezvousTimeout, {.mode = Mode::kStaged, .delta = true});
      REQUIRE_HERE(batch.recv(1, kPatience).wait() == 1 && batch.stats().delta_routes == 0);
      REQUIRE_HERE(check_destination(cases[0], 0, 1, data).empty());
      if (!late) steps[0].pass();
      steps[1].pass();
      REQUIRE_HERE(batch.recv(2, kPatience).wait() == 2);
      // Its first delta was made before it came, and is not what the deltas of its session build on.
      REQUIRE_HERE(batch.stats().delta_routes == (late ? 0 : 1));
      REQUIRE_HERE(check_destination(cases[0], 0, 2, data).empty());
      steps[2].pass();
      return 0;
    });
  };
  start_member(true, 0, [&](Member& member) {
    member.send(1).wait();
    steps[0].pass();
    steps[1].pass();
    member.send(2).wait();
    steps[2].pass();
    return 0;
  });
  receiver("inference", false);
  receiver("other", true);
  for (Barrier& step : steps) step.open();
  expect_success();
}

// --- what a receiver holds -----------------------------------------------------------------------

// The first element; one byte of it suffices.
void spoil(Member& member) {
  LocalData& data = member.data()[0];
  data.bytes()[data.offset] ^= std::byte{0x40};
}

TEST_F(Deltas, ADestinationThatWasWrittenIsNoticedByItsDigestAndTakenInFull) {
  jobs_ = {.sources = 2, .destinations = 2};
  cases_ = {rows_to_columns()};
  start_all(
      [&](Member& member) {
        for (const int64_t version : {1, 2, 3}) member.send(version).wait();
        return 0;
      },
      [&](Member& member) {
        REQUIRE_HERE(deltas_of(member, 1) == 0);
        spoil(member);
        REQUIRE_HERE(deltas_of(member, 2) == 1);  // the other one came in full in the end
        if (!member.holds(2)) return kWrong;
        REQUIRE_HERE(deltas_of(member, 3) == 2);
        return member.holds(3) ? 0 : kWrong;
      });
  expect_success();
  for (const char* name : {"inference/0", "inference/1"})
    EXPECT_THAT(of(name).output, AllOf(HasSubstr("tensor w"), HasSubstr("is taken in full")));
}

// The bits cannot be compared here: the receiver's word must do.
TEST_F(Deltas, ACastIsPutOnTopOfWhatIsThere) {
  cases_ = {small_changes(DType::kF32, DType::kBF16)};
  start_all(
      [&](Member& member) {
        for (const int64_t version : {1, 2, 3}) member.send(version).wait();
        return 0;
      },
      [&](Member& member) {
        REQUIRE_HERE(deltas_of(member, 1) == 0 && member.holds(1));
        REQUIRE_HERE(deltas_of(member, 2) == 1 && member.holds(2));
        spoil(member);
        REQUIRE_HERE(deltas_of(member, 3) == 1 && !member.holds(3));
        return 0;
      });
  expect_success();
}

TEST_F(Deltas, DigestsAreThoseOfTheWholeTensors) {
  jobs_ = {.sources = 2, .destinations = 2};
  cases_ = {rows_to_columns(), rows_to_columns(small_changes(DType::kF32, DType::kF16))};
  cases_[1].name = "cast";
  struct Sums {
    std::atomic<uint64_t> sent[3][2];
    std::atomic<uint64_t> received[3][2];
  };
  Shared<Sums> sums;
  const auto add = [](const Batch& batch, std::atomic<uint64_t>(&to)[2]) {
    for (size_t i = 0; i < 2; ++i) to[i] += batch.digests().at(i).d0;
  };
  start_all(
      [&](Member& member) {
        for (const int64_t version : {1, 2, 3}) {
          member.send(version).wait();
          add(member.batch(), sums->sent[version - 1]);
        }
        return 0;
      },
      [&](Member& member) {
        for (const int64_t version : {1, 2, 3}) {
          REQUIRE_HERE(deltas_of(member, version) == (version == 1 ? 0 : 4));
          add(member.batch(), sums->received[version - 1]);
        }
        return 0;
      });
  expect_success();
  for (size_t version = 0; version < 3; ++version) {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(sums->sent[version][i].load(), sums->received[version][i].load()) << version << " " << i;
      EXPECT_NE(sums->sent[version][i].load(), 0U);
    }
  }
  EXPECT_NE(sums->sent[0][0].load(), sums->sent[1][0].load());
}

// --- who asks ------------------------------------------------------------------------------------

TEST_F(Deltas, AreOffUnlessBothSidesAsk) {
  for (const bool sender : {true, false}) {
    TestJobs jobs;
    const DeltaJobs asks{.sender_asks = sender, .receiver_asks = !sender};
    for (const Side& side : {trainer(0, 1), inference(0, 1)})
      jobs.start(side.who(), [&] {
        Member member(asks, {small_changes()}, jobs.store(), side.sends, 0);
        for (const int64_t version : {1, 2}) {
          if (side.sends)
            member.send(version).wait();
          else
            REQUIRE_HERE(deltas_of(member, version) == 0 && member.holds(version));
        }
        REQUIRE_HERE(member.stats().delta_routes == 0);
        return 0;
      });
    jobs.expect_all_well(6 * hang_limit());
    for (const Side& side : {trainer(0, 1), inference(0, 1)}) {
      const bool says =
          jobs.of(side.who()).output.find("not all ranks of both jobs have asked for deltas") != std::string::npos;
      EXPECT_EQ(says, side.sends == sender) << jobs.of(side.who()).output;
    }
  }
}

TEST_F(Deltas, SaySoOnceWhenTheyDoNotPay) {
  cases_ = {small_changes()};
  cases_[0].chances = {};
  start_all(
      [&](Member& member) {
        for (int64_t version = 1; version <= 20; ++version) member.send(version).wait();
        return 0;
      },
      [&](Member& member) {
        for (int64_t version = 1; version <= 20; ++version) REQUIRE_HERE(deltas_of(member, version) == 0);
        return 0;
      });
  expect_success();
  for (const std::string name : {"trainer/0", "inference/0"}) {
    const std::string& output = of(name).output;
    const size_t at = output.find("no delta was smaller");
    EXPECT_EQ(at != std::string::npos, name == "trainer/0") << output;
    EXPECT_EQ(output.find("no delta was smaller", at + 1), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::test
