// Tensors that are quantised on their way between jobs of real processes. Every element of every rank is what the codec
// makes of the whole tensor, bit for bit, whatever the layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <utility>

#include "base/fail_point.h"
#include "base/mutation.h"
#include "base/testing.h"
#include "exec/wire_testing.h"
#include "tests/multiproc/agents.h"
#include "tests/multiproc/jobs.h"
#include "tests/random_case.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

constexpr int64_t kVersions = 2;
constexpr int kWrong = 3;  // exit status of a receiver that has found a wrong element

enum class Asks { kSender, kReceiver, kBoth };

struct WireJobs {
  int sources;
  int destinations;
  Asks asks = Asks::kBoth;
  bool staged = false;
  const char* pull = "";
  const char* agent = "embedded";  // of the receivers
  int64_t versions = kVersions;
};

TensorSpec wire_spec(const RandomCase& a, LocalData& data, DType dtype, const Layout& layout, bool asks) {
  TensorSpec spec{.name = a.name,
                  .data = data.bytes().data() + data.offset,
                  .dtype = dtype,
                  .shape = a.shape,
                  .layout = layout,
                  .strides = data.strides};
  if (asks) spec.wire = a.wire;
  return spec;
}

TensorSpec received_spec(const RandomCase& a, LocalData& data, bool asks) {
  TensorSpec spec = wire_spec(a, data, a.dst_dtype, a.dst, asks || !a.planes.empty());
  spec.planes = a.planes;
  return spec;
}

int send_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, Rank rank,
               Barrier& all_done) {
  Bus bus({.job = "trainer", .rank = rank, .world = jobs.sources, .store = store, .agent = "embedded", .threads = 1});
  Pair pair = bus.pair({.name = "weights", .peer = "inference"});
  std::vector<LocalData> data;
  for (const RandomCase& a : cases) data.push_back(source_space(a, rank));
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < cases.size(); ++i)
    specs.push_back(wire_spec(cases[i], data[i], cases[i].src_dtype, cases[i].src, jobs.asks != Asks::kReceiver));
  Batch batch = pair.offer("policy", specs, kRendezvousTimeout, {.mode = jobs.staged ? Mode::kStaged : Mode::kInPlace});
  for (int64_t version = 1; version <= jobs.versions; ++version) {
    for (size_t i = 0; i < cases.size(); ++i) fill_source(cases[i], rank, version, data[i]);
    batch.send(version).wait();
  }
  all_done.pass();
  return 0;
}

int receive_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases, const std::string& store, Rank rank) {
  ::setenv("TESSERA_FORCE_PULL", jobs.pull, 1);
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
    specs.push_back(received_spec(cases[i], data[i], jobs.asks != Asks::kSender));
  Batch batch =
      pair.accept("policy", specs, kRendezvousTimeout, {.mode = jobs.staged ? Mode::kStaged : Mode::kInPlace});
  for (int64_t version = 1; version <= jobs.versions; ++version) {
    const int64_t taken = batch.recv(version).wait();
    if (jobs.staged ? taken < version : taken != version) return 2;
    version = taken;
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string wrong = check_destination(cases[i], rank, version, data[i]);
      if (wrong.empty()) continue;
      std::fprintf(stderr, "version %ld: %s\n", static_cast<long>(version), wrong.c_str());
      return kWrong;
    }
  }
  return 0;
}

// Runs both jobs; the senders make `mistake`.
std::vector<Outcome> transfer_cases(const WireJobs& jobs, const std::vector<RandomCase>& cases,
                                    Mutation mistake = Mutation::kNone) {
  ProcessGroup group;
  const std::string store = group.start_store();
  AgentGroup agents(group);
  const bool daemons = jobs.agent == std::string("daemon");
  if (daemons)
    for (Rank rank = 0; rank < jobs.destinations; ++rank) agents.start_agent("inference", rank, jobs.pull);
  Barrier all_done;  // a staged sender is done before anybody has taken what it sends
  for (Rank rank = 0; rank < jobs.sources; ++rank)
    agents.start("trainer/" + std::to_string(rank), [&, rank] {
      mutation() = mistake;
      return send_cases(jobs, cases, store, rank, all_done);
    });
  for (Rank rank = 0; rank < jobs.destinations; ++rank)
    agents.start("inference/" + std::to_string(rank), [&, rank] { return receive_cases(jobs, cases, store, rank); });
  all_done.open();
  if (!daemons) return group.wait(6 * hang_limit());
  agents.wait(6 * hang_limit());  // expects that all end well
  return {};
}

RandomCase fixed_case(Format format, const Shape& shape, const std::string& from, const std::string& to) {
  return {.name = "w",
          .shape = shape,
          .src_dtype = DType::kBF16,
          .dst_dtype = DType::kBF16,
          .src = Layout::parse(from),
          .dst = Layout::parse(to),
          .seed = 7,
          .wire = format};
}

TEST(Wire, RowsToColumns) {
  const WireJobs jobs{2, 2};
  for (const Outcome& outcome : transfer_cases(jobs, {fixed_case(Format::kNvfp4, {64, 64}, "2:S0", "2:S1")}))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCases = 7;
#else
constexpr int kCases = 42;
#endif

// All formats, and tensors that travel as they are among them.
std::vector<RandomCase> random_cases(const WireJobs& jobs, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RandomCase> cases;
  for (int i = 0; i < kCases; ++i) {
    const std::string name = "t" + std::to_string(i);
    const Format format = all_formats()[static_cast<size_t>(i) % all_formats().size()];
    cases.push_back(i % 6 == 5 ? random_case(random, name, jobs.sources, jobs.destinations)
                               : random_wire_case(random, name, jobs.sources, jobs.destinations, format));
  }
  return cases;
}

struct RandomJobs {
  WireJobs jobs;
  uint64_t seed;

  friend void PrintTo(const RandomJobs& random, std::ostream* out) { *out << "seed " << random.seed; }
};

class RandomWire : public testing::TestWithParam<RandomJobs> {};

TEST_P(RandomWire, EveryElementIsThatOfTheWholeTensorQuantised) {
  const auto& [jobs, seed] = GetParam();
  for (const Outcome& outcome : transfer_cases(jobs, random_cases(jobs, seed)))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomWire,
    testing::Values(RandomJobs{{1, 1}, 21}, RandomJobs{{2, 3, Asks::kSender}, 22},
                    RandomJobs{{.sources = 4, .destinations = 2, .asks = Asks::kReceiver, .pull = "ring"}, 23},
                    RandomJobs{{.sources = 3, .destinations = 4, .staged = true}, 24},
                    RandomJobs{{.sources = 6, .destinations = 1, .pull = "readv"}, 25}),
    [](const auto& random) {
      return std::to_string(random.param.jobs.sources) + "To" + std::to_string(random.param.jobs.destinations);
    });

// --- planes
// ------------------------------------------------------------------------------------------------------------

std::vector<RandomCase> random_planes_cases(const WireJobs& jobs, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RandomCase> cases;
  for (int i = 0; i < kCases; ++i) {
    const Format format = all_formats()[static_cast<size_t>(i) % all_formats().size()];
    const auto make = i % 8 == 7 ? random_wire_case : random_planes_case;
    cases.push_back(make(random, "t" + std::to_string(i), jobs.sources, jobs.destinations, format));
  }
  return cases;
}

class RandomPlanes : public testing::TestWithParam<RandomJobs> {};

TEST_P(RandomPlanes, EveryByteIsThatOfThePlanesOfTheWholeTensor) {
  const auto& [jobs, seed] = GetParam();
  for (const Outcome& outcome : transfer_cases(jobs, random_planes_cases(jobs, seed)))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

INSTANTIATE_TEST_SUITE_P(Jobs, RandomPlanes,
                         testing::Values(RandomJobs{{1, 1}, 31}, RandomJobs{{2, 3, Asks::kSender}, 32},
                                         RandomJobs{{.sources = 4, .destinations = 2, .asks = Asks::kReceiver}, 33},
                                         RandomJobs{{.sources = 3, .destinations = 4, .staged = true}, 34},
                                         RandomJobs{
                                             {.sources = 2, .destinations = 2, .staged = true, .agent = "daemon"}, 35}),
                         [](const auto& random) {
                           return std::to_string(random.param.jobs.sources) + "To" +
                                  std::to_string(random.param.jobs.destinations) + random.param.jobs.agent;
                         });

// --- digests
// -----------------------------------------------------------------------------------------------------------

struct Sums {
  std::atomic<uint64_t> d0, d1;
  std::atomic<int64_t> elements;

  void add(const TensorDigest& digest) {
    d0 += digest.d0;
    d1 += digest.d1;
    elements += digest.elements;
  }
  Digest total() const { return {.d = {d0, d1}, .elements = static_cast<uint64_t>(elements)}; }
};

// Shards of both sides cut blocks.
TEST(WireDigests, AddUpToThatOfTheCodesAndScalesOfTheWholeTensor) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp8, Format::kFp8E4M3}) {
    exec_testing::Random random(31);
    const exec_testing::WireReference whole(random, codec::BlockFormat(format), DType::kF32, 1, 64, 44);
    const auto side_of = [&](Side side) {
      side.layout = "2:S1";
      side.shape = {64, 44};
      side.wire = format;
      return side;
    };
    Shared<Sums> sent, received;
    ProcessGroup group;
    const std::string store = group.start_store();
    for (Rank rank = 0; rank < 2; ++rank) {
      group.start("trainer", [&, rank] {
        return with_batch(side_of(trainer(rank)), store, [&](Batch& batch, std::vector<float>& tensor) {
          for (Index i = 0; i < 64 * 22; ++i)
            std::memcpy(&tensor[static_cast<size_t>(i)], whole.value(0, i / 22, rank * 22 + i % 22), sizeof(float));
          batch.send().wait();
          sent->add(batch.digests().at(0));
          return 0;
        });
      });
      Side receiver = side_of(inference(rank));
      receiver.layout = "2:S0";
      group.start("inference", [&, receiver] {
        return with_batch(receiver, store, [&](Batch& batch, std::vector<float>&) {
          batch.recv().wait();
          received->add(batch.digests().at(0));
          return 0;
        });
      });
    }
    for (const Outcome& outcome : group.wait(3 * hang_limit()))
      EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    const Digest expected = exec_testing::WireTensor{.whole = &whole, .shape = {64, 44}}.digest();
    EXPECT_EQ(sent->total(), expected) << to_string(format);
    EXPECT_EQ(received->total(), expected) << to_string(format);
  }
}

// --- mistakes
// ---------------------------------------------------------------------------------------------------------

bool found_out(const std::vector<Outcome>& outcomes) {
  return std::ranges::any_of(outcomes, [](const Outcome& outcome) { return outcome.status == kWrong; });
}

TEST(WireMistakes, AmaxesThatRanksKeepToThemselvesAreFoundOut) {
  for (const Format format : {Format::kNvfp4, Format::kFp8E4M3})
    for (const auto& [sources, layout] : {std::pair(2, "2:S0"), std::pair(3, "3:S0"), std::pair(4, "4:S1")}) {
      const std::vector<RandomCase> cases{fixed_case(format, {96, 64}, layout, "2:S1")};
      EXPECT_TRUE(found_out(
          transfer_cases({.sources = sources, .destinations = 2, .versions = 1}, cases, Mutation::kLocalAmax)))
          << to_string(format) << " " << layout;
    }
}

// Of formats whose scales are powers of two a wrong one is seldom seen in the values.
TEST(WireMistakes, AmaxesOfCutBlocksThatRanksKeepToThemselvesAreFoundOut) {
  for (const char* layout : {"2:S1", "3:S0"}) {
    const int sources = layout[0] - '0';
    const std::vector<RandomCase> cases{fixed_case(Format::kNvfp4, {90, 60}, layout, "2:S0")};
    EXPECT_TRUE(found_out(
        transfer_cases({.sources = sources, .destinations = 2, .versions = 1}, cases, Mutation::kLocalBlockAmax)))
        << layout;
  }
}

TEST(WireMistakes, OneRankHasNobodyToDisagreeWith) {
  for (const Mutation mistake : {Mutation::kLocalAmax, Mutation::kLocalBlockAmax})
    for (const Outcome& outcome :
         transfer_cases({1, 2}, {fixed_case(Format::kNvfp4, {90, 60}, "1:R", "2:S1")}, mistake))
      EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

// --- failures
// ---------------------------------------------------------------------------------------------------------

Side quantised(Side side) {
  side.wire = Format::kNvfp4;
  return side;
}

TEST(WireFailures, WhatIsNotFiniteIsRefusedByAllRanksAlikeAndMendedByTheSameVersion) {
  ProcessGroup group;
  const std::string store = group.start_store();
  for (Rank rank = 0; rank < 3; ++rank)
    group.start("trainer", [=] {
      return with_batch(quantised(trainer(rank, 3)), store, [&](Batch& batch, std::vector<float>& tensor) {
        fill(trainer(rank, 3), tensor, 1);
        const float whole = std::exchange(tensor[5], rank == 1 ? std::numeric_limits<float>::quiet_NaN() : tensor[5]);
        std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1).wait(); }).c_str());
        tensor[5] = whole;
        batch.send(1).wait();
        return 0;
      });
    });
  for (Rank rank = 0; rank < 2; ++rank)
    group.start("inference", [=] {
      return with_batch(quantised(inference(rank)), store, [&](Batch& batch, std::vector<float>& tensor) {
        REQUIRE_HERE(batch.recv().wait() == 1 && std::isfinite(tensor[5]));
        return 0;
      });
    });
  for (const Outcome& outcome : group.wait(3 * hang_limit())) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    if (outcome.name == "trainer") {
      EXPECT_THAT(outcome.output, HasSubstr("tensor weight: nan at [22, 5] (rank trainer/1): nvfp4 refuses"));
    }
  }
}

TEST(WireFailures, AnAmaxThatTheFormatCannotTakeIsRefusedByAllRanksAlike) {
  ProcessGroup group;
  const std::string store = group.start_store();
  for (Rank rank = 0; rank < 2; ++rank)
    group.start("trainer", [=] {
      return with_batch(quantised(trainer(rank)), store, [&](Batch& batch, std::vector<float>& tensor) {
        if (rank == 1) tensor[5] = 1e-37F;
        std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1).wait(); }).c_str());
        tensor[5] = 1;
        batch.send(2).wait();
        return 0;
      });
    });
  for (Rank rank = 0; rank < 2; ++rank)
    group.start("inference", [=] {
      return with_batch(quantised(inference(rank)), store, [&](Batch& batch, std::vector<float>&) {
        REQUIRE_HERE(batch.recv().wait() == 2);
        return 0;
      });
    });
  for (const Outcome& outcome : group.wait(3 * hang_limit())) {
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
    if (outcome.name == "trainer") {
      EXPECT_THAT(outcome.output, HasSubstr("tensor weight: the amax of matrix 0 is 1e-37: nvfp4 takes"));
    }
  }
}

struct Death {
  const char* place;
  Rank rank;

  friend void PrintTo(const Death& death, std::ostream* out) { *out << death.place << " of rank " << death.rank; }
};

const char* place_of_death = nullptr;

class WireDeaths : public testing::TestWithParam<Death> {};

// The receivers lose a sender, too.
TEST_P(WireDeaths, EndTheOthersWithinASecond) {
  const Death death = GetParam();
  ProcessGroup group;
  const std::string store = group.start_store();
  place_of_death = death.place;
  for (Rank rank = 0; rank < 3; ++rank)
    group.start("trainer/" + std::to_string(rank), [=] {
      return with_batch(quantised(trainer(rank, 3)), store, [=](Batch& batch, std::vector<float>&) {
        if (rank == death.rank)
          fail_point_hook() = [](std::string_view place) {
            if (place == place_of_death) ::raise(SIGKILL);
          };
        batch.send(1).wait();
        return 0;
      });
    });
  for (Rank rank = 0; rank < 2; ++rank)
    group.start("inference", [=] { return with_batch(quantised(inference(rank)), store, receive_once); });
  const std::vector<Outcome> outcomes = group.wait(3 * hang_limit());
  double died = 0;
  for (const Outcome& outcome : outcomes)
    if (outcome.status == -SIGKILL) died = outcome.seconds;
  EXPECT_GT(died, 0);
  for (const Outcome& outcome : outcomes) {
    if (outcome.status == -SIGKILL) continue;
    EXPECT_EQ(outcome.status, kPeerLost) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("trainer/" + std::to_string(death.rank)));
    EXPECT_LT(outcome.seconds - died, 1) << outcome.name << ": " << outcome.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, WireDeaths,
                         testing::Values(Death{"wire: amax", 0}, Death{"wire: amax", 2}, Death{"wire: reported", 0},
                                         Death{"wire: reported", 2}, Death{"wire: agreed", 0},
                                         Death{"wire: agreed", 2}),
                         [](const auto& death) {
                           return std::string(death.param.place + sizeof("wire:")) + std::to_string(death.param.rank);
                         });

}  // namespace
}  // namespace tessera::test
