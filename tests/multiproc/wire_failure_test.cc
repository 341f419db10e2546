// Sends of quantised tensors that fail, and ranks that die, stop or corrupt what they send: all ranks fail alike, and
// the next version succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <ostream>
#include <utility>

#include "base/fail_point.h"
#include "base/testing.h"
#include "tests/support/fixture.h"
#include "tests/support/wire_jobs.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using WireFailures = JobsTest;

TEST_F(WireFailures, WhatIsNotFiniteIsRefusedByAllRanksAlikeAndMendedByTheSameVersion) {
  for (Rank rank = 0; rank < 3; ++rank)
    start(quantised(trainer(rank, 3)), [&](Batch& batch, std::vector<float>& tensor) {
      fill(trainer(rank, 3), tensor, 1);
      const float whole = std::exchange(tensor[5], rank == 1 ? std::numeric_limits<float>::quiet_NaN() : tensor[5]);
      std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1).wait(); }).c_str());
      tensor[5] = whole;
      batch.send(1).wait();
      return 0;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(quantised(inference(rank)), [&](Batch& batch, std::vector<float>& tensor) {
      REQUIRE_HERE(batch.recv().wait() == 1 && std::isfinite(tensor[5]));
      return 0;
    });
  expect_all_well(3 * hang_limit());
  for (const Outcome& outcome : wait()) {
    if (outcome.name.starts_with("trainer")) {
      EXPECT_THAT(outcome.output, HasSubstr("tensor weight: nan at [22, 5] (rank trainer/1): nvfp4 takes only finite"));
    }
  }
}

TEST_F(WireFailures, AnAmaxThatTheFormatCannotTakeIsRefusedByAllRanksAlike) {
  for (Rank rank = 0; rank < 2; ++rank)
    start(quantised(trainer(rank)), [&](Batch& batch, std::vector<float>& tensor) {
      if (rank == 1) tensor[5] = 1e-37F;
      std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1).wait(); }).c_str());
      tensor[5] = 1;
      batch.send(2).wait();
      return 0;
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(quantised(inference(rank)), [&](Batch& batch, std::vector<float>&) {
      REQUIRE_HERE(batch.recv().wait() == 2);
      return 0;
    });
  expect_all_well(3 * hang_limit());
  for (const Outcome& outcome : wait()) {
    if (outcome.name.starts_with("trainer")) {
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

class WireDeaths : public JobsTest, public testing::WithParamInterface<Death> {};

// The receivers lose a sender, too.
TEST_P(WireDeaths, EndTheOthersLongBeforeTheirDeadlines) {
  const Death death = GetParam();
  place_of_death = death.place;
  Barrier all;
  for (Rank rank = 0; rank < 3; ++rank)
    start(quantised(trainer(rank, 3)), [&](Batch& batch, std::vector<float>& tensor) {
      if (rank == death.rank)
        fail_point_hook() = [](std::string_view place) {
          if (place == place_of_death) ::raise(SIGKILL);
        };
      return until_all_know(all, [&] { return send_once(batch, tensor); });
    });
  for (Rank rank = 0; rank < 2; ++rank)
    start(quantised(inference(rank)), [&](Batch& batch, std::vector<float>& tensor) {
      return until_all_know(all, [&] { return receive_once(batch, tensor); });
    });
  all.open();
  const std::vector<Outcome> outcomes = wait(3 * hang_limit());
  const double died = seconds_of_death(outcomes);
  EXPECT_GT(died, 0);
  for (const Outcome& outcome : outcomes) {
    if (outcome.status == -SIGKILL) continue;
    EXPECT_EQ(outcome.status, kPeerLost) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("trainer/" + std::to_string(death.rank)));
    EXPECT_LT(outcome.seconds - died, 10) << outcome.name << ": " << outcome.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, WireDeaths,
                         testing::Values(Death{"wire: amax", 0}, Death{"wire: amax", 2}, Death{"wire: reported", 0},
                                         Death{"wire: reported", 2}, Death{"wire: agreed", 0},
                                         Death{"wire: agreed", 2}),
                         [](const auto& death) {
                           return std::string(death.param.place + sizeof("wire:")) + std::to_string(death.param.rank);
                         });

// --- more than can be agreed on ------------------------------------------------------------------

struct TooMany {
  const char* name;
  Shape shape;
  const char* layout;
  Format format;
  const char* text;

  friend void PrintTo(const TooMany& many, std::ostream* out) { *out << many.name; }
};

class WireTooMany : public JobsTest, public testing::WithParamInterface<TooMany> {};

// Columns that begin inside the only block of each of 2^22 + 1 rows; and as many matrices, each with an amax.
TEST_P(WireTooMany, AmaxesAreRefusedAtRegistrationByAllRanks) {
  Barrier told;
  const auto start_with = [&](Side side, const char* layout) {
    side.shape = GetParam().shape;
    side.layout = layout;
    side.wire = GetParam().format;
    side.rendezvous = kRendezvousTimeout;
    start(side, [&](Pair& pair) {
      std::vector<float> tensor = local_tensor(side);
      return until_all_know(told, [&] {
        (void)register_tensor(pair, side, tensor.data());
        return 0;
      });
    });
  };
  for (const Rank rank : {0, 1}) start_with(trainer(rank), GetParam().layout);
  start_with(inference(0, 1), "1:R");
  told.open();
  for (const Outcome& outcome : wait(4 * hang_limit())) {
    EXPECT_EQ(outcome.status, status_of(ErrorCode::kResourceExhausted)) << outcome.name << ": " << outcome.output;
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr("batch policy of pair weights: ranks would have to agree on 4194305 amaxes before they "
                                "quantise, and 4194304 are possible"),
                      HasSubstr(GetParam().text), HasSubstr("or for none")))
        << outcome.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    , WireTooMany,
    testing::Values(
        TooMany{"Blocks",
                {(1 << 22) + 1, 2},
                "2:S1",
                Format::kMxfp8,
                "tensor weight has 0 matrices with one each, and its layout 2:S1 cuts 4194305 blocks of mxfp8"},
        TooMany{"Matrices",
                {(1 << 22) + 1, 1, 2},
                "2:S0",
                Format::kFp8E4M3,
                "tensor weight has 4194305 matrices with one each, and its layout 2:S0 cuts 0 blocks"}),
    [](const auto& many) { return many.param.name; });

// --- what arrives otherwise than it was sent -----------------------------------------------------

class WireDigestMismatch : public testing::TestWithParam<Mutation> {};

TEST_P(WireDigestMismatch, NamesTheTensorAndItsSenderAndTheNextVersionIsWhole) {
  for (const char* pull : {"", "stream"}) {
    TestJobs jobs;
    for (Rank rank = 0; rank < 2; ++rank)
      jobs.start(quantised(trainer(rank)), [&](Batch& batch, std::vector<float>& tensor) {
        fill(trainer(rank), tensor, 1);
        if (rank == 1) mutation() = GetParam();
        // The other rank may have to wait for a receiver that was late because of this one's failure.
        std::fprintf(stderr, "%s\n", error_of([&] { batch.send(1, kPatience).wait(); }).c_str());
        mutation() = Mutation::kNone;
        fill(trainer(rank), tensor, 2);
        batch.send(2).wait();
        return 0;
      });
    for (Rank rank = 0; rank < 2; ++rank)
      jobs.start(inference(rank).who(), [&] {
        ::setenv("TESSERA_FORCE_PULL", pull, 1);
        const Side side = quantised(inference(rank));
        return with_batch(side, jobs.store(), [&](Batch& batch, std::vector<float>& tensor) {
          while (batch.version() < 2) std::fprintf(stderr, "%s\n", error_of([&] { batch.recv().wait(); }).c_str());
          REQUIRE_HERE(!batch.torn() && holds_quantised(side, tensor, 2));
          return 0;
        });
      });
    std::string said[2];
    jobs.expect_all_well(3 * hang_limit());
    for (const Outcome& outcome : jobs.wait()) said[outcome.name.starts_with("trainer") ? 0 : 1] += outcome.output;
    EXPECT_THAT(said[0], AllOf(HasSubstr("data-loss: "), HasSubstr(": digest of tensor weight ")));
    EXPECT_THAT(said[1], AllOf(HasSubstr("data-loss: "), HasSubstr("digest of tensor weight "),
                               HasSubstr("differs: trainer/1 sent")));
  }
}

INSTANTIATE_TEST_SUITE_P(Spoiled, WireDigestMismatch,
                         testing::Values(Mutation::kSpoiledCode, Mutation::kSpoiledScale, Mutation::kSpoiledAmax),
                         [](const auto& spoiled) {
                           return spoiled.param == Mutation::kSpoiledCode    ? "Code"
                                  : spoiled.param == Mutation::kSpoiledScale ? "Scale"
                                                                             : "Amax";
                         });

}  // namespace
}  // namespace tessera::test
