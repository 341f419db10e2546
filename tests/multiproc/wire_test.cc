// Tensors that travel quantised between jobs of real processes. Every element of every rank is what the codec computes
// from the whole tensor, bit for bit, whatever the layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <utility>

#include "exec/wire/wire_testing.h"
#include "tests/support/brute_values.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

TEST(Wire, RowsToColumns) {
  const WireJobs jobs{2, 2};
  expect_all_well(transfer_cases(jobs, {fixed_case(Format::kNvfp4, {64, 64}, "2:S0", "2:S1")}));
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
  expect_all_well(transfer_cases(jobs, random_cases(jobs, seed)));
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomWire,
    testing::Values(RandomJobs{{1, 1}, 21}, RandomJobs{{2, 3, Asks::kSender}, 22},
                    RandomJobs{{.sources = 4, .destinations = 2, .asks = Asks::kReceiver, .pull = "stream"}, 23},
                    RandomJobs{{.sources = 3, .destinations = 4, .sends = Mode::kStaged, .receives = Mode::kStaged},
                               24},
                    RandomJobs{{.sources = 6, .destinations = 1, .pull = "readv"}, 25}),
    [](const auto& random) {
      return std::to_string(random.param.jobs.sources) + "To" + std::to_string(random.param.jobs.destinations);
    });

// --- planes --------------------------------------------------------------------------------------

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
  expect_all_well(transfer_cases(jobs, random_planes_cases(jobs, seed)));
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomPlanes,
    testing::Values(RandomJobs{{1, 1}, 31}, RandomJobs{{2, 3, Asks::kSender}, 32},
                    RandomJobs{{.sources = 4, .destinations = 2, .asks = Asks::kReceiver}, 33},
                    RandomJobs{{.sources = 3, .destinations = 4, .sends = Mode::kStaged, .receives = Mode::kStaged},
                               34},
                    RandomJobs{{.sources = 2,
                                .destinations = 2,
                                .sends = Mode::kStaged,
                                .receives = Mode::kStaged,
                                .receiver_agents = true},
                               35}),
    [](const auto& random) {
      return std::to_string(random.param.jobs.sources) + "To" + std::to_string(random.param.jobs.destinations) +
             (random.param.jobs.receiver_agents ? "Daemons" : "");
    });

// --- quantised already ---------------------------------------------------------------------------

std::vector<RandomCase> random_encoded_cases(const WireJobs& jobs, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RandomCase> cases;
  for (int i = 0; i < kCases; ++i) {
    const Format format = all_formats()[static_cast<size_t>(i) % all_formats().size()];
    const auto make = i % 8 == 7 ? random_planes_case : random_encoded_case;
    cases.push_back(make(random, "t" + std::to_string(i), jobs.sources, jobs.destinations, format));
  }
  return cases;
}

class RandomEncoded : public testing::TestWithParam<RandomJobs> {};

TEST_P(RandomEncoded, WhatArrivesIsWhatQuantisingOnTheWayWouldHaveGiven) {
  const auto& [jobs, seed] = GetParam();
  expect_all_well(transfer_cases(jobs, random_encoded_cases(jobs, seed)));
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, RandomEncoded,
    testing::Values(
        RandomJobs{{1, 1}, 41}, RandomJobs{{2, 3}, 42},
        RandomJobs{{.sources = 4, .destinations = 2, .asks = Asks::kReceiver, .pull = "stream"}, 43},
        RandomJobs{{.sources = 3, .destinations = 4, .sends = Mode::kStaged, .receives = Mode::kStaged}, 44},
        RandomJobs{
            {.sources = 2, .destinations = 2, .sends = Mode::kStaged, .receives = Mode::kStaged, .sender_agents = true},
            45}),
    [](const auto& random) {
      return std::to_string(random.param.jobs.sources) + "To" + std::to_string(random.param.jobs.destinations) +
             (random.param.jobs.sender_agents ? "Daemons" : "");
    });

// --- digests -------------------------------------------------------------------------------------

struct Sums {
  std::atomic<uint64_t> d0, d1;
  std::atomic<int64_t> elements;

  void add(const TensorDigest& digest) {
    d0 += digest.d0;
    d1 += digest.d1;
    elements += digest.elements;
  }
  void add(const Digest& digest) {
    d0 += digest.d[0];
    d1 += digest.d[1];
    elements += static_cast<int64_t>(digest.elements);
  }
  Digest total() const { return {.d = {d0, d1}, .elements = static_cast<uint64_t>(elements)}; }
};

// Shards of both sides cut blocks.
TEST(WireDigests, AddUpToThatOfTheCodesAndScalesOfTheWholeTensor) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp8, Format::kFp8E4M3}) {
    // In the ranks: the test's process must not read the environment before they have theirs.
    const auto make_whole = [&] {
      exec_testing::Random random(31);
      return exec_testing::WireReference(random, codec::BlockFormat(format), DType::kF32, 1, 64, 44);
    };
    const auto side_of = [&](Side side) {
      side.layout = "2:S1";
      side.shape = {64, 44};
      side.wire = format;
      return side;
    };
    Shared<Sums> expected, sent, received;
    ProcessGroup group;
    const std::string store = group.start_store();
    for (Rank rank = 0; rank < 2; ++rank) {
      group.start("trainer", [&, rank] {
        const exec_testing::WireReference whole = make_whole();
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
    group.start("the whole", [&] {
      const exec_testing::WireReference whole = make_whole();
      expected->add(exec_testing::WireTensor{.whole = &whole, .shape = {64, 44}}.digest());
      return 0;
    });
    expect_all_well(group.wait(3 * hang_limit()));
    EXPECT_EQ(sent->total(), expected->total()) << to_string(format);
    EXPECT_EQ(received->total(), expected->total()) << to_string(format);
  }
}

// --- mistakes ------------------------------------------------------------------------------------

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

TEST(WireMistakes, AmaxesOfCutBlocksThatRanksKeepToThemselvesAreFoundOut) {
  for (const char* layout : {"2:S1", "3:S0"}) {
    const int sources = layout[0] - '0';
    const std::vector<RandomCase> cases{fixed_case(Format::kNvfp4, {90, 60}, layout, "2:S0")};
    EXPECT_TRUE(found_out(
        transfer_cases({.sources = sources, .destinations = 2, .versions = 1}, cases, Mutation::kLocalBlockAmax)))
        << layout;
  }
}

// Rank 0's part of a cut block is so small that the block's scale, which rank 1 determines, leaves nothing of it.
float lopsided_value(const Side& side, Index element) {
  const float value = 1 + static_cast<float>(mix(static_cast<uint64_t>(element)) % 256) / 256;
  return std::ldexp(value, element % side.shape[1] < side.shape[1] / 2 ? -33 : 0);
}

// In formats whose scales are powers of two, a wrong scale rarely shows if the values are similar.
TEST(WireMistakes, ThoseOfLopsidedBlocksAreFoundOutWhereScalesArePowersOfTwo) {
  for (const Format format : {Format::kMxfp8, Format::kMxfp8E5M2, Format::kFp8Block1x128, Format::kFp8Block128x128})
    for (const Mutation mistake : {Mutation::kNone, Mutation::kLocalBlockAmax}) {
      const auto side_of = [&](Side side, const char* layout) {
        side.layout = layout;
        return quantised(side, format);
      };
      ProcessGroup group;
      const std::string store = group.start_store();
      for (Rank rank = 0; rank < 2; ++rank) {
        const Side sends = side_of(trainer(rank), "2:S1");
        group.start("trainer", [=] {
          mutation() = mistake;
          return with_batch(sends, store, [&](Batch& batch, std::vector<float>& tensor) {
            fill(sends, tensor, 0);  // with places
            for (float& element : tensor) element = lopsided_value(sends, static_cast<Index>(element));
            batch.send().wait();
            return 0;
          });
        });
        const Side receives = side_of(inference(rank), "2:S0");
        group.start("inference", [=] {
          return with_batch(receives, store, [&](Batch& batch, std::vector<float>& tensor) {
            batch.recv().wait();
            std::vector<float> whole;
            for (Index i = 0; i < element_count(receives.shape); ++i) whole.push_back(lopsided_value(receives, i));
            whole = quantised_values(format, std::move(whole), receives.shape[0], receives.shape[1]);
            const size_t half = whole.size() / 2;
            return std::equal(tensor.begin(), tensor.begin() + static_cast<ptrdiff_t>(half),
                              whole.begin() + static_cast<ptrdiff_t>(half) * rank)
                       ? 0
                       : kWrong;
          });
        });
      }
      const std::vector<Outcome> outcomes = group.wait(3 * hang_limit());
      EXPECT_EQ(found_out(outcomes), mistake != Mutation::kNone) << to_string(format);
      if (mistake == Mutation::kNone) expect_all_well(outcomes);
    }
}

TEST(WireMistakes, OneRankHasNobodyToDisagreeWith) {
  for (const Mutation mistake : {Mutation::kLocalAmax, Mutation::kLocalBlockAmax})
    expect_all_well(transfer_cases({1, 2}, {fixed_case(Format::kNvfp4, {90, 60}, "1:R", "2:S1")}, mistake));
}

}  // namespace
}  // namespace tessera::test
