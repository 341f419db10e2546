// What a rank's page says of gradients is believed only as far as it is possible.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/testing.h"
#include "collective/group.h"
#include "etp/etp_testing.h"

namespace tessera::etp {
namespace {

using collective::kMaxIntervals;
using collective::kMaxRounds;
using collective::kWholeRank;
using collective::round_word;
using collective::Word;
using testing::AllOf;
using testing::HasSubstr;

// Rank 1 produces a gradient in interval 1, tells `lie` in its page, and waits until the group has failed. Returns the
// error of rank 0, which makes `step` until then.
std::string error_after(const std::function<void(Runtime&, collective::Group&, WeightId)>& step,
                        const std::function<void(collective::Group&, WeightId)>& lie) {
  std::string error;
  run_ranks(2, [&](ShardGroup group) {
    collective::Group& ranks = *group.impl();
    Runtime runtime(group, {});
    const WeightId weight = runtime.add({.name = "w", .rows = 32, .columns = 8});
    runtime.start();
    produce_ones(runtime, weight);
    runtime.update({{weight}}, [] {});
    if (group.rank() == 1) {
      produce_ones(runtime, weight);
      lie(ranks, weight);
      EXPECT_THAT(error_of([&] {
                    ranks.barrier("told");
                    const auto never = ranks.at_least(0, Word::kPublished, weight, 1000, "what never comes");
                    ranks.device().wait_host(*never, soon());
                  }),
                  HasSubstr("rank 1"));
    } else {
      error = error_of([&] {
        ranks.barrier("told");
        step(runtime, ranks, weight);
      });
    }
    group.leave();
  });
  return error;
}

void update(Runtime& runtime, collective::Group&, WeightId weight) {
  produce_ones(runtime, weight);
  runtime.update({{weight}}, [] {});
}

// Looks for room in the pool: whether all owners have folded its first round.
void produce_twice(Runtime& runtime, collective::Group& group, WeightId weight) {
  produce_ones(runtime, weight);
  group.device().wait_host(*group.at_least(0, Word::kFolded, weight, round_word(1, 1), "its own fold"), soon());
  produce_ones(runtime, weight);
}

TEST(DistrustTest, RoundsThatNobodyCanHaveProduced) {
  for (const uint64_t rounds : {uint64_t{1000}, kMaxRounds})
    EXPECT_THAT(error_after(update, [&](auto& group, auto w) { group.set(Word::kProduced, w, round_word(1, rounds)); }),
                AllOf(HasSubstr("data-loss: "), HasSubstr("rank 1"), HasSubstr("its word 'produced' of slot 0")));
}

TEST(DistrustTest, RoundsOfAnIntervalThatHasNotBegun) {
  const uint64_t word = round_word(kMaxIntervals, 1);
  EXPECT_THAT(error_after(update, [&](auto& group, auto w) { group.set(Word::kProduced, w, word); }),
              HasSubstr("rank 1"));
}

TEST(DistrustTest, RoundsThatNobodyCanHaveFolded) {
  for (const uint64_t word : {round_word(1, kMaxRounds), round_word(2, 0), round_word(kMaxIntervals, 0)})
    EXPECT_THAT(error_after(produce_twice, [&](auto& group, auto w) { group.set(Word::kFolded, w, word); }),
                AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'folded' of slot 0")));
}

TEST(DistrustTest, IntervalsThatNobodyCanHaveClosed) {
  EXPECT_THAT(error_after(update, [&](auto& group, auto) { group.set(Word::kClosed, kWholeRank, kMaxIntervals); }),
              AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'closed'")));
}

TEST(DistrustTest, UpdatesThatNobodyCanHaveBegun) {
  std::string error;
  run_ranks(2, [&](ShardGroup group) {
    Runtime runtime(group, {});
    const WeightId weight = runtime.add({.name = "w", .rows = 32, .columns = 8});
    runtime.start();
    if (group.rank() == 1) group.impl()->set(Word::kRetired, kWholeRank, 2);
    group.impl()->barrier("told");
    const std::string own = error_of([&] { runtime.update({{weight}}, [] {}); });
    if (group.rank() == 0) error = own;
    group.leave();
  });
  EXPECT_THAT(error, AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'retired'")));
}

TEST(DistrustTest, VersionsThatNobodyCanHavePublished) {
  EXPECT_THAT(error_of([] {
                run_ranks(2, [](ShardGroup group) {
                  Runtime runtime(group, {});
                  const WeightId weight = runtime.add({.name = "w", .rows = 32, .columns = 8});
                  runtime.start();
                  if (group.rank() == 1) group.impl()->set(Word::kPublished, weight, uint64_t{1} << 60);
                  group.impl()->barrier("told");
                  if (group.rank() == 0) runtime.acquire(weight, Phase::kForward);
                  group.leave();
                });
              }),
              AllOf(HasSubstr("rank 1"), HasSubstr("has published version 1152921504606846976 of w")));
}

}  // namespace
}  // namespace tessera::etp
