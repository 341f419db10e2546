// Rank 0 of the star, with peers that a test scripts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bus/prepare/amax_testing.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class RankZero : public testing::Test, protected Star {};

TEST_F(RankZero, GivesEveryoneTheLargestOfEachKey) {
  zero_.start(7, {5, 1, 6});
  EXPECT_THAT(zero_.waiting_for(), ElementsAre("trainer/1", "trainer/2"));
  tell(1, 7, 1, {9, 2});
  EXPECT_THAT(zero_.waiting_for(), ElementsAre("trainer/2"));
  EXPECT_THAT(zero_.over(), IsEmpty());
  tell(2, 7, 1, {1.5});
  EXPECT_THAT(zero_.over(), ElementsAre("6 2 6"));
  EXPECT_EQ(member(1).answer(), "7, 1: 9 2");
  EXPECT_EQ(member(2).answer(), "7, 1: 2");
  let_all_agree(8, 2);
}

// Rank 0 has none of the matrix that is quantised already.
TEST(RankZeroOfAQuantisedTensor, FailsAllWhereTwoRanksAreGivenDifferentAmaxes) {
  constexpr AmaxKey kGiven{.matrix = 3, .row = AmaxKey::kWhole, .column = AmaxKey::kGivenAmax};
  Star star{{kMatrix}};
  star.join(1, {kMatrix, kGiven});
  star.join(2, {kGiven});
  star.zero_.start(7, {5});
  star.tell(1, 7, 1, {2, 9});
  star.tell(2, 7, 1, {9});
  EXPECT_THAT(star.zero_.over(), ElementsAre("5"));
  EXPECT_EQ(star.member(1).answer(), "7, 1: 5 9");
  EXPECT_EQ(star.member(2).answer(), "7, 1: 9");
  star.zero_.start(8, {5});
  star.tell(1, 8, 2, {9, 2});
  star.tell(2, 8, 2, {0});
  const std::string differ =
      "tensor w: its matrix 3 is quantised with amax 2 on trainer/1 and 0 on trainer/2: shards that are quantised "
      "already "
      "need the amax of the whole tensor: quantize(shard, amax=...)";
  EXPECT_THAT(star.zero_.over(), ElementsAre("mismatch: " + differ));
  EXPECT_EQ(star.member(1).answer(), "8, 2: " + differ);
  EXPECT_EQ(star.member(2).answer(), "8, 2: " + differ);
}

TEST(RankZeroOfAQuantisedTensor, ComparesWhatItIsGivenItself) {
  constexpr AmaxKey kScale{.matrix = 0, .row = AmaxKey::kWhole, .column = AmaxKey::kGivenScale};
  Star star{{kScale, kScale}};
  star.join(1, {kScale});
  star.join(2, {});
  star.zero_.start(7, {0.5, 0.5});
  star.tell(1, 7, 1, {0.25});
  star.tell(2, 7, 1, {});
  EXPECT_THAT(star.zero_.over(), ElementsAre(HasSubstr("quantised with scale 0.5 on trainer/0 and 0.25 on trainer/1")));
}

TEST_F(RankZero, KeepsWhatComesBeforeItsTurn) {
  tell(1, 7, 1, {9, 2});
  tell(2, 7, 1, {4});
  EXPECT_THAT(zero_.over(), IsEmpty());
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 4 0"));
}

TEST_F(RankZero, TheFirstValueThatNoFormatTakesFailsAll) {
  zero_.start(7, {}, {.tensor = 0, .index = 20, .rank = 0, .value = kNan});
  say(1, {.version = 7, .epoch = 1, .finding = {.tensor = 0, .index = 19, .rank = 1, .value = kNan}});
  say(2, {.version = 7, .epoch = 1, .finding = {.tensor = 0, .index = 19, .rank = 2, .value = kNan}});
  EXPECT_THAT(zero_.over(),
              ElementsAre("invalid-argument: tensor w: nan at [2, 3] (rank trainer/1): nvfp4 takes only finite "
                          "values"));
  for (const Rank rank : {1, 2}) {
    const auto agreed = member(rank).next<Agreed>();
    EXPECT_TRUE(agreed.status.ok());
    EXPECT_EQ(std::tuple(agreed.finding.tensor, agreed.finding.index, agreed.finding.rank), std::tuple(0U, 19U, 1));
  }
  let_all_agree(7, 2);
}

TEST_F(RankZero, AMemberThatIsPastTheVersionFailsAll) {
  zero_.start(7, {0, 0, 0});
  tell(1, 7, 1, {0, 0});
  tell(2, 8, 1, {0});
  EXPECT_THAT(zero_.over(),
              ElementsAre("mismatch: trainer/2 sends version 8, trainer/0 version 7: send is collective"));
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/2 sends version 8, trainer/0 version 7: send is collective");
  EXPECT_TRUE(member(2).silent()) << "its turn may come";
  tell(1, 8, 2, {0, 0});
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 0 0"));
  EXPECT_EQ(member(2).answer(), "8, 1: 0");
}

TEST_F(RankZero, AMemberThatIsBehindIsToldAlone) {
  zero_.start(8, {0, 0, 0});
  tell(1, 8, 1, {0, 0});
  tell(2, 7, 1, {0});
  EXPECT_EQ(member(2).answer(), "7, 1: trainer/2 sends version 7, trainer/0 version 8: send is collective");
  EXPECT_THAT(zero_.over(), IsEmpty());
  tell(2, 8, 2, {4});
  EXPECT_THAT(zero_.over(), ElementsAre("0 4 0"));
}

TEST_F(RankZero, AFailureReplacesWhatWasTold) {
  tell(1, 7, 1, {9, 2});
  tell(2, 7, 1, {0});
  say(1, {.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "the send was cancelled")});
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/1: the send was cancelled"));
  EXPECT_EQ(member(2).answer(), "7, 1: trainer/1: the send was cancelled");
}

TEST_F(RankZero, AFailureIsToldThoughThatMemberSendsTheNextVersionAlready) {
  tell(1, 7, 1, {9, 2});
  say(2, {.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "the send was cancelled")});
  tell(2, 8, 2, {4});
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2: the send was cancelled"));
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/2: the send was cancelled");
  EXPECT_TRUE(member(2).silent()) << "its turn may come";
  tell(1, 8, 2, {0, 0});
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 4 0"));
  EXPECT_EQ(member(2).answer(), "8, 2: 4");
}

TEST_F(RankZero, AFailureAndTheAnswerMayCross) {
  let_all_agree(7, 1);
  say(1, {.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "the send was cancelled")});
  let_all_agree(7, 2);
}

TEST_F(RankZero, WhoComesLateToAFailedVersionIsTold) {
  zero_.start(7, {0, 0, 0});
  tell(1, 7, 1, {0, 0});
  zero_.with([](AmaxExchange& exchange) { exchange.abort(Status(ErrorCode::kCancelled, "the send was cancelled")); });
  EXPECT_THAT(zero_.over(), ElementsAre("cancelled: the send was cancelled"));
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/0: the send was cancelled");
  tell(2, 7, 1, {0});
  EXPECT_EQ(member(2).answer(), "7, 1: trainer/0: the send was cancelled");
  tell(1, 7, 2, {1, 2});  // they repeat it, rank 0 last
  tell(2, 7, 2, {3});
  EXPECT_TRUE(member(1).silent() && member(2).silent());
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 3 0"));
}

TEST_F(RankZero, AVersionThatItGivesUpIsFailedForTheOthers) {
  tell(1, 7, 1, {0, 0});
  zero_.with([](AmaxExchange& exchange) { exchange.give_up(7, Status(ErrorCode::kDeadlineExceeded, "late")); });
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/0: late");
  zero_.start(8, {0, 0, 0});
  tell(2, 7, 1, {0});
  EXPECT_EQ(member(2).answer(), "7, 1: trainer/0: late");
  EXPECT_THAT(zero_.over(), IsEmpty());
}

TEST_F(RankZero, AVersionThatAMemberHasSentBeforeFailsAtOnce) {
  const auto has_sent = [](int64_t version) {
    return Amaxes{.version = version, .epoch = 0, .status = Status(ErrorCode::kCancelled, "has sent it")};
  };
  say(2, has_sent(7));
  tell(1, 7, 1, {0, 0});
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2 has sent version 7 already"));
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/2 has sent version 7 already");
  let_all_agree(8, 2);
  zero_.start(9, {0, 0, 0});
  say(2, has_sent(9));
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2 has sent version 9 already"));
}

TEST_F(RankZero, WhatItHasSentBeforeIsNotAskedFor) {
  tell(1, 7, 1, {0, 0});
  zero_.with([](AmaxExchange& exchange) { exchange.passed(7); });
  tell(2, 6, 1, {0});
  EXPECT_EQ(member(1).answer(), "7, 1: trainer/0 has sent version 7 already");
  EXPECT_EQ(member(2).answer(), "6, 1: trainer/0 has sent version 6 already");
  let_all_agree(8, 2);
}

TEST_F(RankZero, ALostMemberIsWaitedForNoMore) {
  zero_.start(7, {0, 0, 0});
  tell(2, 7, 1, {0});
  member(1).close();
  zero_.with([&](AmaxExchange&) { links_.at(1)->poll(); });
  EXPECT_THAT(zero_.lost(), ElementsAre("trainer/1 has closed its connection"));
  EXPECT_EQ(member(2).next<Broken>().status.message(), "trainer/1 has closed its connection");
  zero_.with([](AmaxExchange& exchange) { exchange.abort(Status(ErrorCode::kPeerLost, "trainer/1 is lost")); });
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/1 is lost"));
  EXPECT_EQ(member(2).answer(), "7, 1: trainer/0: trainer/1 is lost");
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/1 has closed its connection"));
}

TEST_F(RankZero, TheOthersHearOfOneThatLeaves) {
  member(1).send(Detach{});
  EXPECT_EQ(member(2).next<Broken>().status.message(), "trainer/1 has closed the batch");
  EXPECT_THAT(zero_.lost(), ElementsAre("trainer/1 has closed the batch"));
}

TEST_F(RankZero, WhatIsMalformedCostsItsSenderTheConnection) {
  const std::pair<Amaxes, const char*> cases[] = {
      {{.version = 7, .epoch = 1, .amaxes = {1}}, "Amaxes of version 7: 1 where 2 keys have joined"},
      {{.version = 7, .epoch = 1, .finding = {.tensor = 1, .index = 0, .rank = 1, .value = kNan}}, "not there"},
      {{.version = 7, .epoch = 1, .finding = {.tensor = 2, .index = 0, .rank = 1, .value = kNan}}, "not there"},
      {{.version = 7, .epoch = 1, .finding = {.tensor = 0, .index = 32, .rank = 1, .value = kNan}}, "not there"},
      {{.version = 7, .epoch = 1, .finding = {.tensor = 0, .index = 0, .rank = 3, .value = kNan}}, "not there"},
      {{.version = 7, .epoch = 1, .finding = {.tensor = 0, .index = 0, .rank = 2, .value = kNan}}, "rank 2 has found"},
      {{.version = 7, .epoch = 0, .amaxes = {1, 2}}, "in epoch 0 out of turn"}};
  for (const auto& [amaxes, text] : cases) {
    Star star;
    star.say(1, amaxes);
    EXPECT_THAT(star.member(1).next<Reject>().text, HasSubstr(text));
    EXPECT_EQ(star.zero_.lost().size(), 1U);
  }
  Star star;
  star.tell(1, 7, 2, {1, 2});
  star.tell(1, 8, 1, {1, 2});
  EXPECT_THAT(star.member(1).next<Reject>().text, HasSubstr("in epoch 1 out of turn"));
  star.member(2).send(Joins{});
  EXPECT_THAT(star.member(2).next<Broken>().status.message(), HasSubstr("out of turn"));
  EXPECT_THAT(star.member(2).next<Reject>().text, HasSubstr("unexpected message"));
}

TEST_F(RankZero, TakesEachMemberOnce) {
  const auto accept = [&](Rank rank) {
    return error_of([&] { zero_.with([&](AmaxExchange& exchange) { exchange.accept(calling(links_.at(1), rank)); }); });
  };
  EXPECT_THAT(accept(1), HasSubstr("trainer/1 is attached already"));
  EXPECT_THAT(accept(0), HasSubstr("trainer/0 collects no amaxes"));
}

TEST(AmaxExchange, ARankAloneAgreesWithItselfAtOnce) {
  Exchanging alone(0, 1, {kCutBlock, kMatrix, kCutBlock});
  alone.start(7, {1, 5, 2});
  EXPECT_THAT(alone.over(), ElementsAre("2 5 2"));
  alone.start(8, {}, {.tensor = 0, .index = 0, .rank = 0, .value = -std::numeric_limits<float>::infinity()});
  EXPECT_THAT(alone.over(), ElementsAre(HasSubstr("tensor w: -inf at [0, 0] (rank trainer/0)")));
}

}  // namespace
}  // namespace tessera::bus
