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
// error of rank 0's step. Both own rows; `uneven`: rank 0 owns none.
std::string error_after(const std::function<void(collective::Group&, WeightId)>& lie, bool uneven = false) {
  std::string error;
  run_ranks(2, [&](ShardGroup group) {
    Runtime runtime(group, {});
    const WeightId weight =
        runtime.add({.name = "w", .rows = uneven ? 1 : 32, .columns = 8, .pad_for_alignment = uneven ? 0 : 16});
    runtime.start();
    produce_ones(runtime, weight);
    runtime.update({{weight}}, [] {});
    if (group.rank() == 1) {
      produce_ones(runtime, weight);
      lie(*group.impl(), weight);
      EXPECT_THAT(error_of([&] {
                    group.impl()->device().wait_host(
                        *group.impl()->at_least(0, Word::kPublished, weight, 1000, "what never comes"), soon());
                  }),
                  HasSubstr("rank 1"));
    } else {
      error = error_of([&] {
        for (int step = 0; step < 3; ++step) {
          produce_ones(runtime, weight);
          runtime.update({{weight}}, [] {});
        }
      });
    }
    group.leave();
  });
  return error;
}

TEST(DistrustTest, RoundsThatNobodyCanHaveProduced) {
  for (const uint64_t rounds : {uint64_t{1000}, kMaxRounds})
    EXPECT_THAT(
        error_after([&](collective::Group& group, WeightId weight) {
          group.set(Word::kProduced, weight, round_word(1, rounds));
        }),
        AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'produced' of slot 0"), HasSubstr("gradients of")));
}

TEST(DistrustTest, RoundsOfAnIntervalThatHasNotBegun) {
  EXPECT_THAT(error_after([&](collective::Group& group, WeightId weight) {
                group.set(Word::kProduced, weight, round_word(kMaxIntervals, 1));
              }),
              HasSubstr("rank 1"));
}

TEST(DistrustTest, RoundsThatNobodyCanHaveFolded) {
  for (const uint64_t word : {round_word(1, kMaxRounds), round_word(2, 0), round_word(kMaxIntervals, 0)})
    EXPECT_THAT(error_after([&](collective::Group& group, WeightId weight) { group.set(Word::kFolded, weight, word); }),
                AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'folded' of slot 0")));
}

TEST(DistrustTest, IntervalsThatNobodyCanHaveClosed) {
  EXPECT_THAT(
      error_after([&](collective::Group& group, WeightId) { group.set(Word::kClosed, kWholeRank, kMaxIntervals); }),
      AllOf(HasSubstr("data-loss: rank 1"), HasSubstr("its word 'closed'")));
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
