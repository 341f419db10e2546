// Wrong deltas, and ranks that die while deltas travel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <ostream>

#include "base/fail_point.h"
#include "base/mutation.h"
#include "tests/multiproc/delta_jobs.h"

namespace tessera::test {
namespace {

class DeltaMistakes : public Deltas {
 protected:
  // The receiver misses version 2; the sender gives it the changes from 2 to 3.
  void start_with_a_stale_delta(bool digest) {
    jobs_ = {.staged = true, .digest = digest};
    cases_ = {small_changes()};
    start_all(
        [this](Member& member) {
          mutation() = Mutation::kStaleBase;
          member.send(1).wait();
          taken_.pass();
          for (const int64_t version : {2, 3}) member.send(version).wait();
          done_.pass();
          return 0;
        },
        [this](Member& member) {
          REQUIRE_HERE(member.batch().recv(1, kPatience).wait() == 1);
          taken_.pass();
          REQUIRE_HERE(member.batch().recv(3, kPatience).wait() == 3);
          const bool right = member.holds(3);
          done_.pass();
          return right ? 0 : kWrong;
        });
    taken_.open();
    done_.open();
  }

 private:
  Barrier taken_, done_;
};

TEST_F(DeltaMistakes, ADeltaOnTopOfAnotherVersionIsFoundOut) {
  start_with_a_stale_delta(false);
  EXPECT_EQ(of("inference/0").status, kWrong) << of("inference/0").output;
  expect_success();
}

TEST_F(DeltaMistakes, AndIsMendedWhereThereAreDigests) {
  start_with_a_stale_delta(true);
  expect_success();
}

struct Death {
  const char* place;
  bool of_sender;

  friend void PrintTo(const Death& death, std::ostream* out) { *out << death.place; }
};

class DeltaDeaths : public Deltas, public testing::WithParamInterface<Death> {};

const char* place_of_death = nullptr;

TEST_P(DeltaDeaths, EndTheOthersLongBeforeTheirDeadlines) {
  const Death death = GetParam();
  jobs_ = {.sources = 2, .destinations = 2};
  cases_ = {rows_to_columns()};
  place_of_death = death.place;
  const auto body = [=](bool sends, Rank rank) {
    return [=](Member& member) {
      for (const int64_t version : {1, 2}) {
        if (version == 2 && rank == 1 && sends == death.of_sender)
          fail_point_hook() = [](std::string_view place) {
            if (place == place_of_death) ::raise(SIGKILL);
          };
        (sends ? member.send(version) : member.batch().recv(version, kPatience)).wait();
      }
      return 0;
    };
  };
  for (const bool sends : {true, false})
    for (const Rank rank : {0, 1}) start_member(sends, rank, body(sends, rank));
  const std::vector<Outcome> outcomes = wait(3 * hang_limit());
  const double died = seconds_of_death(outcomes);
  EXPECT_GT(died, 0);
  for (const Outcome& outcome : outcomes) {
    if (outcome.status == -SIGKILL) continue;
    // A receiver may already have all that it wants from the one that dies.
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
