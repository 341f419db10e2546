// Deltas between jobs of real processes: every element of every rank is what it would be without them, bit for bit,
// whatever a receiver has missed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <ostream>
#include <random>
#include <utility>

#include "base/fail_point.h"
#include "base/mutation.h"
#include "base/testing.h"
#include "tests/support/agents.h"
#include "tests/support/jobs.h"
#include "tests/support/random_case.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

constexpr int kWrong = 3;  // exit status of a receiver that has found a wrong element

struct DeltaJobs {
  int sources = 1;
  int destinations = 1;
  bool staged = false;
  bool digest = true;
  const char* pull = "";
  const char* agent = "embedded";
  bool sender_asks = true;
  bool receiver_asks = true;
};

// One rank of either job, its batch and its tensors.
class Member {
 public:
  Member(const DeltaJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, bool sends, Rank rank)
      : cases_(cases), rank_(rank) {
    if (!sends) ::setenv("TESSERA_FORCE_PULL", jobs.pull, 1);
    bus_ = std::make_unique<Bus>(BusOptions{.job = sends ? "trainer" : "inference",
                                            .rank = rank,
                                            .world = sends ? jobs.sources : jobs.destinations,
                                            .store = store,
                                            .agent = jobs.agent,
                                            .threads = 1,
                                            .digest = jobs.digest});
    pair_ = std::make_unique<Pair>(bus_->pair({.name = "weights", .peer = sends ? "inference" : "trainer"}));
    std::vector<TensorSpec> specs;
    data_.reserve(cases.size());
    for (const RandomCase& a : cases) {
      data_.push_back(sends ? source_space(a, rank) : destination_space(a, rank));
      specs.push_back({.name = a.name,
                       .data = data_.back().bytes().data() + data_.back().offset,
                       .dtype = sends ? a.src_dtype : a.dst_dtype,
                       .shape = a.shape,
                       .layout = sends ? a.src : a.dst,
                       .strides = data_.back().strides,
                       .wire = a.wire});
    }
    const BatchOptions options{.mode = jobs.staged ? Mode::kStaged : Mode::kInPlace,
                               .delta = sends ? jobs.sender_asks : jobs.receiver_asks};
    batch_ = std::make_unique<Batch>(sends ? pair_->offer("policy", specs, kRendezvousTimeout, options)
                                           : pair_->accept("policy", specs, kRendezvousTimeout, options));
  }

  Batch& batch() { return *batch_; }
  BatchStats stats() const { return batch_->stats(); }
  std::vector<LocalData>& data() { return data_; }

  // Sender: as `version`, what RandomCase has as `contents`.
  Handle send(int64_t version, int64_t contents, Timeout timeout = kPatience) {
    for (size_t i = 0; i < cases_.size(); ++i) fill_source(cases_[i], rank_, contents, data_[i]);
    return batch_->send(version, timeout);
  }
  Handle send(int64_t version) { return send(version, version); }

  // Receiver: whether those are the contents; tells which element is wrong.
  bool holds(int64_t contents) {
    for (size_t i = 0; i < cases_.size(); ++i) {
      const std::string wrong = check_destination(cases_[i], rank_, contents, data_[i]);
      if (wrong.empty()) continue;
      std::fprintf(stderr, "contents %ld: %s\n", static_cast<long>(contents), wrong.c_str());
      return false;
    }
    return true;
  }

 private:
  const std::vector<RandomCase> cases_;
  const Rank rank_;
  std::vector<LocalData> data_;
  std::unique_ptr<Bus> bus_;
  std::unique_ptr<Pair> pair_;
  std::unique_ptr<Batch> batch_;
};

using Body = std::function<int(Member& member)>;

class Deltas : public testing::Test {
 protected:
  pid_t start(bool sends, Rank rank, const Body& body) {
    const std::string name = (sends ? "trainer/" : "inference/") + std::to_string(rank);
    return group_.start(name, [=, this] {
      Member member(jobs_, cases_, store_, sends, rank);
      return body(member);
    });
  }
  void start_all(const Body& sender, const Body& receiver) {
    for (Rank rank = 0; rank < jobs_.sources; ++rank) start(true, rank, sender);
    for (Rank rank = 0; rank < jobs_.destinations; ++rank) start(false, rank, receiver);
  }
  void expect_success() {
    for (const Outcome& outcome : group_.wait(6 * hang_limit()))
      EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  }

  DeltaJobs jobs_;
  std::vector<RandomCase> cases_;
  ProcessGroup group_;
  const std::string store_ = group_.start_store();
};

// A matrix of which a hundredth changes with each version.
RandomCase small_changes(DType src_dtype = DType::kF32, DType dst_dtype = DType::kF32) {
  return {.name = "w",
          .shape = {96, 64},
          .src_dtype = src_dtype,
          .dst_dtype = dst_dtype,
          .src = Layout::parse("1:R"),
          .dst = Layout::parse("1:R"),
          .seed = 7,
          .chances = {0.01}};
}

RandomCase rows_to_columns(RandomCase a = small_changes()) {
  a.src = Layout::parse("2:S0");
  a.dst = Layout::parse("2:S1");
  return a;
}

// --- random layouts ------------------------------------------------------------------------------

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 7;
#else
constexpr int kCases = 42;
#endif
constexpr double kChances[] = {0.01, 0, 1e-4, 0.3, 1, 0.05};
constexpr int64_t kVersions = 1 + static_cast<int64_t>(std::size(kChances));

// Every dtype and some that are cast, reduced or quantised; a chance each version, beginning at another one each.
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

class RandomDeltas : public testing::TestWithParam<RandomJobs> {};

// All take every version: each waits for the others.
TEST_P(RandomDeltas, EveryElementIsWhatItWouldBeWithout) {
  const auto& [jobs, seed] = GetParam();
  const std::vector<RandomCase> cases = random_cases(jobs, seed);
  Shared<std::atomic<int64_t>> sent, received;
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  if (jobs.agent == std::string("daemon")) {
    for (Rank rank = 0; rank < jobs.sources; ++rank) agents.start_agent("trainer", rank);
    for (Rank rank = 0; rank < jobs.destinations; ++rank) agents.start_agent("inference", rank);
  }
  std::vector<Barrier> steps(kVersions);  // which agents need not pass
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    agents.start("trainer/" + std::to_string(rank), [&, rank] {
      Member member(jobs, cases, store, true, rank);
      for (int64_t version = 1; version <= kVersions; ++version) {
        member.send(version).wait();
        steps[static_cast<size_t>(version - 1)].pass();
      }
      *sent += member.stats().delta_routes;
      return 0;
    });
  for (Rank rank = 0; rank < jobs.destinations; ++rank)
    agents.start("inference/" + std::to_string(rank), [&, rank] {
      Member member(jobs, cases, store, false, rank);
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
  agents.wait(6 * hang_limit());  // expects that all end well
  EXPECT_EQ(sent->load(), received->load());
  EXPECT_GT(received->load(), kCases);
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomDeltas,
    testing::Values(RandomJobs{{}, 41}, RandomJobs{{.sources = 2, .destinations = 3}, 42},
                    RandomJobs{{.sources = 4, .destinations = 2, .pull = "ring"}, 43},
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

// Sent once more with other contents: what the receivers hold is neither.
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

// A new process of the same rank knows nothing, and neither does a new session.
TEST_F(Deltas, AReceiverThatComesBackTakesAllOfItOnce) {
  jobs_ = {.sources = 1, .destinations = 1};
  cases_ = {small_changes()};
  start(true, 0, [&](Member& member) {
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
  const pid_t first = start(false, 0, [&](Member& member) {
    REQUIRE_HERE(deltas_of(member, 1) == 0);
    REQUIRE_HERE(deltas_of(member, 2) == 1 && member.holds(2));
    ::raise(SIGKILL);
    return 0;
  });
  group_.start("inference/0, again", [&] {
    await_end(first);
    Member member(jobs_, cases_, store_, false, 0);
    const int64_t version = member.batch().recv({}, kPatience).wait();
    REQUIRE_HERE(member.stats().delta_routes == 0 && member.holds(version));
    REQUIRE_HERE(deltas_of(member, version + 1) == 1);
    REQUIRE_HERE(member.holds(version + 1));
    for (int64_t next = version + 2; went_well([&] { member.batch().recv(next, kPatience).wait(); }); ++next)
      REQUIRE_HERE(member.holds(next));
    return 0;
  });
  for (const Outcome& outcome : group_.wait(6 * hang_limit()))
    EXPECT_THAT(outcome.status, testing::AnyOf(0, -SIGKILL)) << outcome.name << ": " << outcome.output;
}

// A job that comes to a staged version which is there already takes it in full, from then on deltas.
TEST_F(Deltas, AStagedVersionThatIsThereIsTakenInFull) {
  jobs_ = {.sources = 1, .destinations = 1, .staged = true};
  cases_ = {small_changes()};
  std::vector<Barrier> steps(3);
  const auto receiver = [&](const std::string& job, bool late) {
    group_.start(job, [&, job, late] {
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
      // Its first one was made before it came, and is not what the deltas of its session are built upon.
      REQUIRE_HERE(batch.stats().delta_routes == (late ? 0 : 1));
      REQUIRE_HERE(check_destination(cases[0], 0, 2, data).empty());
      steps[2].pass();
      return 0;
    });
  };
  start(true, 0, [&](Member& member) {
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
  for (const Outcome& outcome : group_.wait(6 * hang_limit())) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    if (outcome.name.starts_with("inference")) {
      EXPECT_THAT(outcome.output, HasSubstr("tensor w"));
      EXPECT_THAT(outcome.output, HasSubstr("is taken in full"));
    }
  }
}

// The bits are not there to be compared: the receiver has promised.
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
    ProcessGroup group;
    const std::string store = group.start_store();
    const DeltaJobs jobs{.sender_asks = sender, .receiver_asks = !sender};
    const std::vector<RandomCase> cases{small_changes()};
    for (const bool sends : {true, false})
      group.start(sends ? "trainer" : "inference", [=] {
        Member member(jobs, cases, store, sends, 0);
        for (const int64_t version : {1, 2}) {
          if (sends)
            member.send(version).wait();
          else
            REQUIRE_HERE(deltas_of(member, version) == 0 && member.holds(version));
        }
        REQUIRE_HERE(member.stats().delta_routes == 0);
        return 0;
      });
    for (const Outcome& outcome : group.wait(6 * hang_limit())) {
      EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
      const bool asked = (outcome.name == "trainer") == sender;
      EXPECT_EQ(outcome.output.find("not all ranks of both jobs have asked for deltas") != std::string::npos, asked)
          << outcome.output;
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
  for (const Outcome& outcome : group_.wait(6 * hang_limit())) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    const size_t at = outcome.output.find("no delta was smaller");
    EXPECT_EQ(at != std::string::npos, outcome.name == "trainer/0") << outcome.output;
    EXPECT_EQ(outcome.output.find("no delta was smaller", at + 1), std::string::npos);
  }
}

// --- mistakes ------------------------------------------------------------------------------------

// The receiver misses version 2; the sender gives it what has changed from 2 to 3.
std::vector<Outcome> take_a_stale_delta(bool digest) {
  ProcessGroup group;
  const std::string store = group.start_store();
  const DeltaJobs jobs{.staged = true, .digest = digest};
  const std::vector<RandomCase> cases{small_changes()};
  Barrier taken, done;
  group.start("trainer", [&] {
    mutation() = Mutation::kStaleBase;
    Member member(jobs, cases, store, true, 0);
    member.send(1).wait();
    taken.pass();
    for (const int64_t version : {2, 3}) member.send(version).wait();
    done.pass();
    return 0;
  });
  group.start("inference", [&] {
    Member member(jobs, cases, store, false, 0);
    REQUIRE_HERE(member.batch().recv(1, kPatience).wait() == 1);
    taken.pass();
    REQUIRE_HERE(member.batch().recv(3, kPatience).wait() == 3);
    const bool right = member.holds(3);
    done.pass();
    return right ? 0 : kWrong;
  });
  taken.open();
  done.open();
  return group.wait(6 * hang_limit());
}

TEST(DeltaMistakes, ADeltaOnTopOfAnotherVersionIsFoundOut) {
  const std::vector<Outcome> outcomes = take_a_stale_delta(false);
  EXPECT_TRUE(std::ranges::any_of(outcomes, [](const Outcome& outcome) { return outcome.status == kWrong; }));
}

TEST(DeltaMistakes, AndIsMendedWhereThereAreDigests) {
  for (const Outcome& outcome : take_a_stale_delta(true))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

// --- deaths --------------------------------------------------------------------------------------

struct Death {
  const char* place;
  bool of_sender;

  friend void PrintTo(const Death& death, std::ostream* out) { *out << death.place; }
};

class DeltaDeaths : public testing::TestWithParam<Death> {};

const char* place_of_death = nullptr;

TEST_P(DeltaDeaths, EndTheOthersLongBeforeTheirDeadlines) {
  const Death death = GetParam();
  ProcessGroup group;
  const std::string store = group.start_store();
  const DeltaJobs jobs{.sources = 2, .destinations = 2};
  const std::vector<RandomCase> cases{rows_to_columns()};
  place_of_death = death.place;
  const auto body = [=](bool sends, Rank rank) {
    Member member(jobs, cases, store, sends, rank);
    for (const int64_t version : {1, 2}) {
      if (version == 2 && rank == 1 && sends == death.of_sender)
        fail_point_hook() = [](std::string_view place) {
          if (place == place_of_death) ::raise(SIGKILL);
        };
      (sends ? member.send(version) : member.batch().recv(version, kPatience)).wait();
    }
    return 0;
  };
  for (const bool sends : {true, false})
    for (const Rank rank : {0, 1})
      group.start((sends ? "trainer/" : "inference/") + std::to_string(rank), [=] { return body(sends, rank); });
  const std::vector<Outcome> outcomes = group.wait(3 * hang_limit());
  const double died = seconds_of_death(outcomes);
  EXPECT_GT(died, 0);
  for (const Outcome& outcome : outcomes) {
    if (outcome.status == -SIGKILL) continue;
    // A receiver may have all that it wants of the one that dies.
    EXPECT_THAT(outcome.status, testing::AnyOf(kPeerLost, death.of_sender ? kPeerLost : 0))
        << outcome.name << ": " << outcome.output;
    EXPECT_LT(outcome.seconds - died, 10) << outcome.name << ": " << outcome.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, DeltaDeaths,
                         testing::Values(Death{"delta: comparing", true}, Death{"delta: compared", true},
                                         Death{"delta: applying", false}),
                         [](const auto& death) { return std::string(death.param.place + sizeof("delta:")); });

}  // namespace
}  // namespace tessera::test
