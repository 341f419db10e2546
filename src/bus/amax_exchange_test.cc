// Each end of the star against peers that say what a test tells them to, and three ranks with each other.
#include "bus/amax_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/socket.h>

#include <future>
#include <limits>

#include "base/socket.h"
#include "base/testing.h"
#include "tessera/version.h"

namespace tessera::bus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const AmaxKey kMatrix{.group = 0, .matrix = 0};
const AmaxKey kCutBlock{.group = 0, .matrix = 0, .row = 3, .column = 1};
const AmaxKey kOtherMatrix{.group = 1, .matrix = 0};

SessionSetup quantising_setup(int world) {
  SessionSetup setup;
  setup.batch = "policy";
  setup.view.name = "weights";
  RankRecord record;
  record.incarnation = Incarnation::self();
  record.world = world;
  setup.view.own.assign(static_cast<size_t>(world), record);
  setup.agreement.session = "0123456789abcdef";
  Match::Tensor w;
  w.name = "w";
  w.shape = {4, 8};
  w.wire = Format::kNvfp4;
  Match::Tensor norm;
  norm.name = "norm";
  norm.shape = {8};
  setup.agreement.match.tensors = {w, norm};
  return setup;
}

Attach agreeing() {
  return {.pair = "weights",
          .batch = "policy",
          .purpose = Attach::Purpose::kAgree,
          .session = quantising_setup(1).agreement.session};
}

Caller calling(std::shared_ptr<Link> link, Rank rank) {
  Hello hello;
  hello.job = "trainer";
  hello.rank = rank;
  hello.incarnation = Incarnation::self();
  return {.link = std::move(link), .hello = std::move(hello), .attach = agreeing()};
}

// The other end of a connection.
class RawRank {
 public:
  explicit RawRank(UniqueFd socket) : socket_(std::move(socket)) {}

  template <typename Message>
  void send(const Message& message) {
    ByteWriter out;
    message.write(out);
    writer_.push(static_cast<uint16_t>(Message::kType), out.view());
    writer_.flush(socket_.get(), soon());
  }
  template <typename Message>
  Message next() {
    const Frame frame = wait_frame(socket_.get(), reader_, soon());
    EXPECT_EQ(to_string(static_cast<MessageType>(frame.type)), to_string(Message::kType));
    return parse<Message>(frame.payload);
  }
  // "version, epoch: 1 2 3", or why there are none.
  std::string answer() {
    const auto agreed = next<Agreed>();
    if (!agreed.status.ok()) return fmt::format("{}, {}: {}", agreed.version, agreed.epoch, agreed.status.message());
    if (agreed.finding.any()) return fmt::format("{}, {}: a finding", agreed.version, agreed.epoch);
    return fmt::format("{}, {}: {}", agreed.version, agreed.epoch, fmt::join(agreed.amaxes, " "));
  }
  bool silent() const {
    char byte = 0;
    return ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  void close() { socket_.reset(); }

 private:
  UniqueFd socket_;
  FrameWriter writer_{kBusMagic, kProtocolMax, size_t{1} << 20};
  FrameReader reader_{kBusMagic, {.payload_bytes = 1 << 20, .fds = 0}};
};

// An exchange and what it has said.
class Exchanging {
 public:
  Exchanging(Rank rank, int world, std::vector<AmaxKey> own)
      : agent_({.name_space = "default", .job = "trainer", .rank = rank, .world = world}, 1),
        setup_(quantising_setup(world)) {
    agent_.run_on_loop([&] {
      exchange_.emplace(
          agent_, setup_, agreeing(), own,
          AmaxExchange::Events{.ready_changed =
                                   [this] {
                                     if (exchange_->ready()) ready_.set_value();
                                   },
                               .lost = [this](const Status& status) { lost_.push_back(status.message()); },
                               .agreed =
                                   [this](const Status& status, std::span<const float> amaxes) {
                                     over_.push_back(status.ok() ? fmt::format("{}", fmt::join(amaxes, " "))
                                                                 : fmt::format("{}: {}", to_string(status.code()),
                                                                               status.message()));
                                     if (on_over_) on_over_();
                                   }});
    });
  }
  ~Exchanging() {
    agent_.run_on_loop([this] { exchange_.reset(); });
  }

  Agent& agent() { return agent_; }
  void start(int64_t version, std::vector<float> amaxes, const NonfiniteFinding& finding = {}) {
    with([&](AmaxExchange& exchange) { exchange.start(version, amaxes, finding); });
  }
  template <typename Call>
  void with(Call call) {
    agent_.run_on_loop([&] { call(*exchange_); });
  }
  // What has been agreed since the last call, or why nothing was.
  std::vector<std::string> over() {
    std::vector<std::string> over;
    agent_.run_on_loop([&] { over.swap(over_); });
    return over;
  }
  std::vector<std::string> lost() {
    std::vector<std::string> lost;
    agent_.run_on_loop([&] { lost.swap(lost_); });
    return lost;
  }
  std::vector<std::string> waiting_for() {
    std::vector<std::string> names;
    with([&](AmaxExchange& exchange) { names = exchange.waiting_for(); });
    return names;
  }
  void wait_ready() { ready_.get_future().wait(); }
  void on_over(std::function<void()> call) {
    agent_.run_on_loop([&] { on_over_ = std::move(call); });
  }

 private:
  Agent agent_;
  const SessionSetup setup_;
  std::optional<AmaxExchange> exchange_;
  std::vector<std::string> over_, lost_;
  std::function<void()> on_over_;
  std::promise<void> ready_;
};

// Rank 0, and fellows: 1 joins a block of the matrix and the matrix, 2 the matrix.
struct Star {
  Star() {
    join(1, {kCutBlock, kMatrix});
    join(2, {kMatrix});
  }
  void join(Rank rank, const std::vector<AmaxKey>& keys) {
    auto [ours, theirs] = socket_pair();
    zero_.with([&](AmaxExchange& exchange) {
      std::shared_ptr<Link> link = Link::adopt(zero_.agent().loop(), std::move(ours), fmt::format("trainer/{}", rank));
      link->set_limits({.payload_bytes = kMaxMessageBytes, .fds = 0});
      links_[rank] = link;
      exchange.accept(calling(link, rank));
    });
    auto& raw = fellows_.emplace(rank, RawRank(std::move(theirs))).first->second;
    (void)raw.next<Prepared>();
    raw.send(Joins{keys});
    zero_.with([&](AmaxExchange&) { links_.at(rank)->poll(); });
  }
  // Returns once rank 0 has seen it.
  void say(Rank rank, const Amaxes& amaxes) {
    fellows_.at(rank).send(amaxes);
    zero_.with([&](AmaxExchange&) { links_.at(rank)->poll(); });
  }
  void tell(Rank rank, int64_t version, uint32_t epoch, std::vector<float> amaxes) {
    say(rank, {.version = version, .epoch = epoch, .amaxes = std::move(amaxes)});
  }
  RawRank& fellow(Rank rank) { return fellows_.at(rank); }
  void let_all_agree(int64_t version, uint32_t epoch) {
    zero_.start(version, {0, 0, 0});
    tell(1, version, epoch, {2, 1});
    tell(2, version, epoch, {3});
    EXPECT_THAT(zero_.over(), ElementsAre("0 3 0"));
    EXPECT_EQ(fellow(1).answer(), fmt::format("{}, {}: 2 3", version, epoch));
    EXPECT_EQ(fellow(2).answer(), fmt::format("{}, {}: 3", version, epoch));
  }

  Exchanging zero_{0, 3, {kOtherMatrix, kMatrix, kOtherMatrix}};
  std::map<Rank, RawRank> fellows_;
  std::map<Rank, std::shared_ptr<Link>> links_;
};

class RankZero : public testing::Test, protected Star {};

TEST_F(RankZero, GivesEveryoneTheLargestOfEachKey) {
  zero_.start(7, {5, 1, 6});
  EXPECT_THAT(zero_.waiting_for(), ElementsAre("trainer/1", "trainer/2"));
  tell(1, 7, 1, {9, 2});
  EXPECT_THAT(zero_.waiting_for(), ElementsAre("trainer/2"));
  EXPECT_THAT(zero_.over(), IsEmpty());
  tell(2, 7, 1, {1.5});
  EXPECT_THAT(zero_.over(), ElementsAre("6 2 6"));
  EXPECT_EQ(fellow(1).answer(), "7, 1: 9 2");
  EXPECT_EQ(fellow(2).answer(), "7, 1: 2");
  let_all_agree(8, 2);
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
              ElementsAre("invalid-argument: tensor w: nan at [2, 3] (rank trainer/1): nvfp4 refuses what "
                          "is not finite"));
  for (const Rank rank : {1, 2}) {
    const auto agreed = fellow(rank).next<Agreed>();
    EXPECT_TRUE(agreed.status.ok());
    EXPECT_EQ(std::tuple(agreed.finding.tensor, agreed.finding.index, agreed.finding.rank), std::tuple(0U, 19U, 1));
  }
  let_all_agree(7, 2);
}

TEST_F(RankZero, AFellowThatIsPastTheVersionFailsAll) {
  zero_.start(7, {0, 0, 0});
  tell(1, 7, 1, {0, 0});
  tell(2, 8, 1, {0});
  EXPECT_THAT(zero_.over(),
              ElementsAre("mismatch: trainer/2 sends version 8, trainer/0 version 7: send is collective"));
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/2 sends version 8, trainer/0 version 7: send is collective");
  EXPECT_TRUE(fellow(2).silent()) << "its turn may come";
  tell(1, 8, 2, {0, 0});
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 0 0"));
  EXPECT_EQ(fellow(2).answer(), "8, 1: 0");
}

TEST_F(RankZero, AFellowThatIsBehindIsToldAlone) {
  zero_.start(8, {0, 0, 0});
  tell(1, 8, 1, {0, 0});
  tell(2, 7, 1, {0});
  EXPECT_EQ(fellow(2).answer(), "7, 1: trainer/2 sends version 7, trainer/0 version 8: send is collective");
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
  EXPECT_EQ(fellow(2).answer(), "7, 1: trainer/1: the send was cancelled");
}

TEST_F(RankZero, AFailureIsToldThoughThatFellowSendsTheNextVersionAlready) {
  tell(1, 7, 1, {9, 2});
  say(2, {.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "the send was cancelled")});
  tell(2, 8, 2, {4});
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2: the send was cancelled"));
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/2: the send was cancelled");
  EXPECT_TRUE(fellow(2).silent()) << "its turn may come";
  tell(1, 8, 2, {0, 0});
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 4 0"));
  EXPECT_EQ(fellow(2).answer(), "8, 2: 4");
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
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/0: the send was cancelled");
  tell(2, 7, 1, {0});
  EXPECT_EQ(fellow(2).answer(), "7, 1: trainer/0: the send was cancelled");
  tell(1, 7, 2, {1, 2});  // they repeat it, and rank 0 does so last
  tell(2, 7, 2, {3});
  EXPECT_TRUE(fellow(1).silent() && fellow(2).silent());
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("0 3 0"));
}

TEST_F(RankZero, AVersionThatItGivesUpIsFailedForTheOthers) {
  tell(1, 7, 1, {0, 0});
  zero_.with([](AmaxExchange& exchange) { exchange.give_up(7, Status(ErrorCode::kDeadlineExceeded, "late")); });
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/0: late");
  zero_.start(8, {0, 0, 0});
  tell(2, 7, 1, {0});
  EXPECT_EQ(fellow(2).answer(), "7, 1: trainer/0: late");
  EXPECT_THAT(zero_.over(), IsEmpty());
}

TEST_F(RankZero, AVersionThatAFellowHasSentBeforeFailsAtOnce) {
  const auto has_sent = [](int64_t version) {
    return Amaxes{.version = version, .epoch = 0, .status = Status(ErrorCode::kCancelled, "has sent it")};
  };
  say(2, has_sent(7));
  tell(1, 7, 1, {0, 0});
  zero_.start(7, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2 has sent version 7 already"));
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/2 has sent version 7 already");
  let_all_agree(8, 2);
  zero_.start(9, {0, 0, 0});
  say(2, has_sent(9));
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/2 has sent version 9 already"));
}

TEST_F(RankZero, WhatItHasSentBeforeIsNotAskedFor) {
  tell(1, 7, 1, {0, 0});
  zero_.with([](AmaxExchange& exchange) { exchange.passed(7); });
  tell(2, 6, 1, {0});
  EXPECT_EQ(fellow(1).answer(), "7, 1: trainer/0 has sent version 7 already");
  EXPECT_EQ(fellow(2).answer(), "6, 1: trainer/0 has sent version 6 already");
  let_all_agree(8, 2);
}

TEST_F(RankZero, ALostFellowIsWaitedForNoMore) {
  zero_.start(7, {0, 0, 0});
  tell(2, 7, 1, {0});
  fellow(1).close();
  zero_.with([&](AmaxExchange&) { links_.at(1)->poll(); });
  EXPECT_THAT(zero_.lost(), ElementsAre("trainer/1 has closed its connection"));
  EXPECT_EQ(fellow(2).next<Broken>().status.message(), "trainer/1 has closed its connection");
  zero_.with([](AmaxExchange& exchange) { exchange.abort(Status(ErrorCode::kPeerLost, "trainer/1 is lost")); });
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/1 is lost"));
  EXPECT_EQ(fellow(2).answer(), "7, 1: trainer/0: trainer/1 is lost");
  zero_.start(8, {0, 0, 0});
  EXPECT_THAT(zero_.over(), ElementsAre("peer-lost: trainer/1 has closed its connection"));
}

TEST_F(RankZero, TheOthersHearOfOneThatLeaves) {
  fellow(1).send(Detach{});
  EXPECT_EQ(fellow(2).next<Broken>().status.message(), "trainer/1 has closed the batch");
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
    EXPECT_THAT(star.fellow(1).next<Reject>().text, HasSubstr(text));
    EXPECT_EQ(star.zero_.lost().size(), 1U);
  }
  Star star;
  star.tell(1, 7, 2, {1, 2});
  star.tell(1, 8, 1, {1, 2});
  EXPECT_THAT(star.fellow(1).next<Reject>().text, HasSubstr("in epoch 1 out of turn"));
  star.fellow(2).send(Joins{});
  EXPECT_THAT(star.fellow(2).next<Broken>().status.message(), HasSubstr("out of turn"));
  EXPECT_THAT(star.fellow(2).next<Reject>().text, HasSubstr("unexpected message"));
}

TEST_F(RankZero, TakesEachFellowOnce) {
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

// Rank 1, and what rank 0 says to it.
class AFellow : public testing::Test {
 protected:
  AFellow() {
    auto [ours, theirs] = socket_pair();
    zero_.emplace(std::move(theirs));
    one_.with([&](AmaxExchange& exchange) {
      link_ = Link::adopt(one_.agent().loop(), std::move(ours), "trainer/0");
      exchange.adopt(link_);
    });
    zero_->send(Welcome{kProtocolMax, kVersion, "trainer", 0, Incarnation::self()});
    EXPECT_EQ(zero_->next<Attach>().purpose, Attach::Purpose::kAgree);
    zero_->send(Prepared{});
    EXPECT_THAT(zero_->next<Joins>().keys, ElementsAre(kCutBlock, kMatrix)) << "ascending, each once";
    one_.wait_ready();
  }
  void say(const Agreed& agreed) {
    zero_->send(agreed);
    one_.with([&](AmaxExchange&) { link_->poll(); });
  }

  Exchanging one_{1, 2, {kMatrix, kCutBlock, kMatrix}};
  std::optional<RawRank> zero_;
  std::shared_ptr<Link> link_;
};

TEST_F(AFellow, TellsItsLargestAndTakesWhatIsAgreed) {
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

TEST_F(AFellow, DoesNotMindAnAnswerToWhatIsOver) {
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

TEST_F(AFellow, SaysWhatItWillNotTell) {
  one_.with([](AmaxExchange& exchange) { exchange.passed(6); });
  const auto passed = zero_->next<Amaxes>();
  EXPECT_EQ(std::tuple(passed.version, passed.epoch), std::tuple(6, 0U));
  EXPECT_EQ(passed.status.message(), "trainer/1 has sent version 6 already");
  one_.with([](AmaxExchange& exchange) { exchange.give_up(7, Status(ErrorCode::kDeadlineExceeded, "late")); });
  const auto given_up = zero_->next<Amaxes>();
  EXPECT_EQ(std::tuple(given_up.version, given_up.epoch), std::tuple(7, 1U));
  EXPECT_EQ(given_up.status.message(), "late");
}

TEST_F(AFellow, FailsAsRankZeroSays) {
  one_.start(7, {1, 2, 3});
  say({.version = 7, .epoch = 1, .status = Status(ErrorCode::kCancelled, "trainer/0: the send was cancelled")});
  EXPECT_THAT(one_.over(), ElementsAre("peer-lost: trainer/0: the send was cancelled"));
  one_.start(7, {1, 2, 3});
  say({.version = 7, .epoch = 2, .finding = {.tensor = 0, .index = 19, .rank = 0, .value = kNan}});
  EXPECT_THAT(one_.over(), ElementsAre(HasSubstr("tensor w: nan at [2, 3] (rank trainer/0): nvfp4 refuses")));
}

TEST_F(AFellow, RefusesAnotherNumberOfAmaxes) {
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

TEST_F(AFellow, HearsThatAnotherRankWasLost) {
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
    other->agent().call(zero.agent().address(), "trainer/0", soon(), [other](std::shared_ptr<Link> link) {
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
