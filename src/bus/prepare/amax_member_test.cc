// The other ranks of the star with a rank 0 that a test scripts, and three real ranks together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bus/prepare/amax_testing.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Rank 1, and the messages that rank 0 sends to it.
class AMember : public testing::Test {
 protected:
  AMember() {
    auto [ours, theirs] = socket_pair();
    zero_.emplace(std::move(theirs));
    one_.with([&](AmaxExchange& exchange) {
      link_ = Link::adopt(one_.agent().loop(), std::move(ours), "trainer/0");
      exchange.adopt(link_);
    });
    zero_->send(Prepared{});
    EXPECT_THAT(zero_->next<Joins>().keys, ElementsAre(kCutBlock, kMatrix)) << "ascending, each once";
    one_.wait_ready();
  }
  void say(const Agreed& agreed) {
    zero_->send(agreed);
    one_.with([&](AmaxExchange&) { link_->poll(); });
  }

  Exchanging one_{1, 2, {kMatrix, kCutBlock, kMatrix}};
  std::optional<RawMember> zero_;
  std::shared_ptr<Link> link_;
};

TEST_F(AMember, TellsItsLargestAndTakesWhatIsAgreed) {
  one_.start(7, {1, 2, 3});
  EXPECT_THAT(one_.waiting_for(), ElementsAre("trainer/0"));
  const auto told = zero_->next<Amaxes>();
  EXPECT_EQ(told.version, 7);
  EXPECT_EQ(told.epoch, 1U);
  EXPECT_THAT(told.amaxes, ElementsAre(2, 3));
  say({.version = 7, .epoch = 1, .amaxes = {4, 9}});
  EXPECT_THAT(one_.over(), ElementsAre("9 4 9"));
  EXPECT_THAT(one_.waiting_for(), IsEmpty());
}

TEST_F(AMember, DoesNotMindAnAnswerToWhatIsOver) {
  one_.start(7, {1, 2, 3});
  one_.with([](AmaxExchange& exchange) { exchange.abort(Status(ErrorCode::kCancelled, "the send was cancelled")); });
  EXPECT_THAT(one_.over(), ElementsAre("cancelled: the send was cancelled"));
  EXPECT_THAT(zero_->next<Amaxes>().amaxes, ElementsAre(2, 3));
  EXPECT_EQ(zero_->next<Amaxes>().status.message(), "the send was cancelled");
  say({.version = 7, .epoch = 1, .amaxes = {4, 9}});
  EXPECT_THAT(one_.over(), IsEmpty());
  one_.start(7, {1, 2, 3});
  say({.version = 7, .epoch = 1, .amaxes = {4, 9}});
  EXPECT_THAT(one_.over(), IsEmpty()) << "it is of the send before";
  say({.version = 7, .epoch = 2, .amaxes = {5, 6}});
  EXPECT_THAT(one_.over(), ElementsAre("6 5 6"));
}

TEST_F(AMember, SaysWhatItWillNotTell) {
  one_.with([](AmaxExchange& exchange) { exchange.passed(6); });
  const auto passed = zero_->next<Amaxes>();
  EXPECT_EQ(std::tuple(passed.version, passed.epoch), std::tuple(6, 0U));
  EXPECT_EQ(passed.status.message(), "trainer/1 has sent version 6 already");
  one_.with([](AmaxExchange& exchange) { exchange.give_up(7, Status(ErrorCode::kDeadlineExceeded, "late")); });
  const auto given_up = zero_->next<Amaxes>();
  EXPECT_EQ(std::tuple(given_up.version, given_up.epoch), std::tuple(7, 1U));
  EXPECT_EQ(given_up.status.message(), "late");
}

TEST_F(AMember, FailsAsRankZeroSays) {
  one_.start(7, {1, 2, 3});
  say({.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "trainer/0: the send was cancelled")});
  EXPECT_THAT(one_.over(), ElementsAre("peer-lost: trainer/0: the send was cancelled"));
  one_.start(7, {1, 2, 3});
  say({.version = 7, .epoch = 2, .finding = {.tensor = 0, .index = 19, .rank = 0, .value = kNan}});
  EXPECT_THAT(one_.over(), ElementsAre(HasSubstr("tensor w: nan at [2, 3] (rank trainer/0): nvfp4 takes only finite")));
}

TEST_F(AMember, RefusesAnotherNumberOfAmaxes) {
  one_.start(7, {1, 2, 3});
  (void)zero_->next<Amaxes>();
  say({.version = 7, .epoch = 1, .amaxes = {4}});
  EXPECT_THAT(zero_->next<Reject>().text, HasSubstr("with 1 amaxes where 2 were asked for of version 7"));
  EXPECT_EQ(one_.lost().size(), 1U);
  one_.with([](AmaxExchange& exchange) { exchange.abort(Status(ErrorCode::kPeerLost, "lost")); });
  one_.over();
  one_.start(8, {1, 2, 3});
  EXPECT_THAT(one_.over(), ElementsAre(HasSubstr("trainer/0"))) << "nobody is left to be asked";
}

TEST_F(AMember, HearsThatAnotherRankWasLost) {
  zero_->send(Broken{Status(ErrorCode::kPeerLost, "trainer/2 has died")});
  one_.with([&](AmaxExchange&) { link_->poll(); });
  EXPECT_THAT(one_.lost(), ElementsAre("trainer/2 has died"));
}

// Hands callers to the exchange of rank 0, as its session does.
class Gate final : public Acceptor {
 public:
  explicit Gate(Exchanging& zero) : zero_(zero) {}
  void accept(Caller caller) override {
    zero_.with([&](AmaxExchange& exchange) { exchange.accept(std::move(caller)); });
  }

 private:
  Exchanging& zero_;
};

TEST(AmaxExchange, ThreeRanksAgreeOverTheirAgents) {
  Exchanging zero(0, 3, {kMatrix});
  Exchanging one(1, 3, {kCutBlock, kMatrix});
  Exchanging two(2, 3, {kMatrix, kCutBlock});
  Gate gate(zero);
  zero.with([&](AmaxExchange&) { zero.agent().open_session(agreeing().session, &gate); });
  for (Exchanging* other : {&one, &two})
    other->with([](AmaxExchange& exchange) { EXPECT_THAT(exchange.peers(), ElementsAre(0)); });
  for (Exchanging* other : {&one, &two})
    other->agent().call({zero.agent().address(), "trainer/0", zero.agent().incarnation()}, agreeing(), soon(),
                        [other](std::shared_ptr<Link> link) {
                          other->with([&](AmaxExchange& exchange) { exchange.adopt(std::move(link)); });
                        });
  for (Exchanging* rank : {&zero, &one, &two}) rank->wait_ready();
  for (int64_t version = 1; version <= 3; ++version) {
    std::promise<void> over[3];
    size_t at = 0;
    for (Exchanging* rank : {&zero, &one, &two}) rank->on_over([&done = over[at++]] { done.set_value(); });
    one.start(version, {1, 10});
    two.start(version, {20, static_cast<float>(version)});
    zero.start(version, {3});
    for (std::promise<void>& done : over) done.get_future().wait();
    EXPECT_THAT(zero.over(), ElementsAre("20"));
    EXPECT_THAT(one.over(), ElementsAre(fmt::format("{} 20", version)));
    EXPECT_THAT(two.over(), ElementsAre(fmt::format("20 {}", version)));
  }
  zero.with([&](AmaxExchange& exchange) {
    exchange.detach({});
    zero.agent().close_session(agreeing().session, &gate);
  });
}

}  // namespace
}  // namespace tessera::bus
