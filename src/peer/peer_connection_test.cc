// Links of an agent over one connection, with a peer that sends what a test tells it to.
#include "peer/peer_connection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <optional>

#include "peer/exchange/messages.h"
#include "peer/peer_testing.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const Broken kWord{Status(ErrorCode::kPeerLost, "hello")};

Hello hello_of(Incarnation incarnation) {
  return {.protocol_min = kProtocolMin,
          .protocol_max = kProtocolMax,
          .release = kVersion,
          .name_space = "default",
          .job = "inference",
          .rank = 0,
          .incarnation = std::move(incarnation)};
}

// An agent with two sessions, and a raw peer that has dialed it and attached to the first, on stream 1.
class ADialer : public testing::Test {
 protected:
  ADialer() {
    agent_.open("one");
    agent_.open("two");
    peer_.say(0, hello_of(self_));
    EXPECT_EQ(peer_.next<Welcome>(0).incarnation, agent_.agent().incarnation());
    attach(1, "one");
  }
  void attach(uint32_t stream, const std::string& session) {
    peer_.say(stream, attach_to(session));
    (void)agent_.at(session).link();
  }
  // Checks that the agent calls over the existing connection.
  void be_called(uint32_t stream, const std::string& session) {
    agent_.agent().call({.address = "none", .name = "inference/0", .incarnation = self_}, attach_to(session), soon(),
                        [&](std::shared_ptr<Link> link) { agent_.at(session).adopt(std::move(link)); });
    EXPECT_EQ(peer_.next<Attach>(stream).session, session);
  }

  const int64_t before_ = connections();
  LinkedAgent agent_{"trainer", 0};
  const Incarnation self_ = Incarnation::next();
  RawPeer peer_{connect_unix(agent_.agent().address(), soon())};
};

TEST_F(ADialer, HasTwoSessionsOverOneSocket) {
  attach(3, "two");
  EXPECT_EQ(connections(), before_ + 1);
  agent_.send("two");
  (void)peer_.next<Broken>(3);
  agent_.send("one");
  (void)peer_.next<Broken>(1);
  peer_.say(3, kWord);
  agent_.at("two").wait_frames(1);
  EXPECT_EQ(agent_.at("one").frames(), 0U);
}

TEST_F(ADialer, ARejectOfOneLinkLeavesTheOther) {
  attach(3, "two");
  peer_.say(3, Reject{ErrorCode::kMismatch, "not so"});
  EXPECT_EQ(agent_.at("two").end(), "inference/0 refuses the connection: not so");
  peer_.say(1, kWord);
  agent_.at("one").wait_frames(1);
  agent_.with("one", [](Link& link) { link.reject(Status(ErrorCode::kMismatch, "nor so")); });
  EXPECT_EQ(peer_.next<Reject>(1).text, "nor so");
  attach(5, "two");
  EXPECT_EQ(connections(), before_ + 1);
}

TEST_F(ADialer, WhatAHandlerRefusesEndsThatLinkAlone) {
  attach(3, "two");
  peer_.say(1, Detach{});
  peer_.say(5, attach_to("three"));
  peer_.say(5, Prepared{});
  EXPECT_THAT(peer_.next<Reject>(5).text, HasSubstr("unexpected message 7"));
  agent_.send("two");
  (void)peer_.next<Broken>(3);
}

TEST_F(ADialer, ALinkThatIsClosedSaysSo) {
  attach(3, "two");
  agent_.close("one");
  (void)peer_.next<Closed>(1);
  peer_.say(3, Closed{});
  EXPECT_EQ(agent_.at("two").end(), "inference/0 has closed its connection");
}

TEST_F(ADialer, LateFramesOfAClosedLinkAreDroppedWithTheirDescriptors) {
  be_called(2, "two");  // its frames may have descriptors
  agent_.close("two");
  (void)peer_.next<Closed>(2);
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(STDERR_FILENO));
  const size_t before = open_fds() - 1;
  peer_.say(2, kWord, std::move(fds));
  peer_.say(1, kWord);
  agent_.at("one").wait_frames(1);
  EXPECT_EQ(agent_.at("two").frames(), 0U);
  agent_.agent().run_on_loop([&] { EXPECT_EQ(open_fds(), before); });
}

TEST_F(ADialer, AStreamThatNobodyHasOpenedEndsTheConnection) {
  attach(3, "two");
  peer_.say(7, kWord);
  EXPECT_THAT(peer_.next<Reject>(0).text, HasSubstr("on stream 7, which nobody has opened"));
  EXPECT_TRUE(peer_.closed());
  EXPECT_THAT(agent_.at("one").end(), HasSubstr("inference/0: message 19 on stream 7"));
  EXPECT_EQ(agent_.at("two").end(), agent_.at("one").end());
  expect_connections(before_);
}

TEST_F(ADialer, AStreamIsOpenedOnce) {
  peer_.say(1, Detach{});
  peer_.say(1, attach_to("two"));
  EXPECT_THAT(peer_.next<Reject>(0).text, HasSubstr("Attach on stream 1 out of turn"));
}

TEST_F(ADialer, OpensItsOwnStreamsAlone) {
  peer_.say(2, attach_to("two"));
  EXPECT_THAT(peer_.next<Reject>(0).text, HasSubstr("Attach on stream 2 out of turn"));
}

TEST_F(ADialer, ADescriptorThatALinkMayNotHaveIsNotKept) {
  be_called(2, "two");
  std::vector<UniqueFd> fds;
  fds.push_back(duplicate_fd(STDERR_FILENO));
  const size_t before = open_fds() - 1;
  peer_.say(1, kWord, std::move(fds));
  EXPECT_THAT(peer_.next<Reject>(0).text, HasSubstr("announces 1 descriptors, at most 0"));
  expect_connections(before_);
  agent_.agent().run_on_loop([&] { EXPECT_EQ(open_fds() + 1, before) << "nor the agent's socket"; });
}

TEST_F(ADialer, IsClosedWhenItSaysGoodbye) {
  peer_.say(1, Detach{});
  peer_.say(0, Goodbye{});
  EXPECT_TRUE(peer_.closed());
  expect_connections(before_);
}

// The agent calls while the Goodbye is on its way.
TEST_F(ADialer, IsKeptWhereAnAttachHasCrossedTheGoodbye) {
  be_called(2, "two");
  peer_.say(1, Detach{});
  peer_.say(0, Goodbye{});
  peer_.say(2, kWord);
  agent_.at("two").wait_frames(1);
  EXPECT_EQ(agent_.at("one").end(), "detached");
  EXPECT_EQ(connections(), before_ + 1);
  peer_.say(2, Detach{});
  peer_.say(0, Goodbye{});
  EXPECT_TRUE(peer_.closed());
}

TEST_F(ADialer, ALinkThatIsStillOpenKeepsIt) {
  attach(3, "two");
  peer_.say(3, Detach{});
  peer_.say(0, Goodbye{});
  agent_.send("one");
  (void)peer_.next<Broken>(1);
}

TEST_F(ADialer, AnotherIncarnationIsNotCalledOverIt) {
  const Callee other{.address = "/none", .name = "inference/0", .incarnation = Incarnation::next()};
  EXPECT_THAT(error_of([&] { agent_.agent().call(other, attach_to("two"), soon(), [](std::shared_ptr<Link>) {}); }),
              HasSubstr("/none"));
}

TEST_F(ADialer, AMessageThatIsLostEndsTheConnectionWithTheNextOne) {
  attach(3, "two");
  peer_.lose(1, kWord);
  peer_.say(3, kWord);
  for (const char* session : {"one", "two"})
    EXPECT_THAT(agent_.at(session).end(), AllOf(HasSubstr("inference/0: message 19"), HasSubstr("lost, doubled")));
  EXPECT_EQ(peer_.next<Reject>(0).code, ErrorCode::kUnavailable);
  EXPECT_EQ(agent_.at("two").frames(), 0U) << "nothing is done out of turn";
}

TEST_F(ADialer, AHelloThatWasChangedIsRefusedForBothToTryAgain) {
  Hello hello = hello_of(self_);
  std::vector<std::byte> payload = payload_of(hello);
  for (const size_t place : {size_t{0}, size_t{2}, size_t{4}, payload.size() / 2, payload.size() - 1}) {
    RawPeer other(connect_unix(agent_.agent().address(), soon()));
    payload[place] ^= std::byte{0x5A};
    other.say_bytes(0, kCode<Hello>, payload);
    EXPECT_EQ(other.next<Reject>(0).code, ErrorCode::kUnavailable) << "byte " << place;
    payload[place] ^= std::byte{0x5A};
  }
}

// That release has no checks, and reads a Hello only up to the fields that it knows.
TEST_F(ADialer, ThePeerOfARelease010IsToldThatThereIsNoCommonProtocol) {
  Hello hello = hello_of(self_);
  hello.protocol_min = hello.protocol_max = 4;
  hello.release = "0.1.0";
  RawPeer other(connect_unix(agent_.agent().address(), soon()), 4);
  other.say_bytes(0, kCode<Hello>, message_bytes(hello));
  const Frame answer = other.frame();
  EXPECT_EQ(answer.type, kCode<Reject>);
  EXPECT_EQ(answer.check, 0);
  EXPECT_THAT(parse<Reject>(answer.payload).text, HasSubstr("no common protocol: "));
}

TEST_F(ADialer, WhatItHasSaidIsFollowedByAPingThatIsAnswered) {
  peer_.say(0, Ping{.number = 1});
  EXPECT_EQ(peer_.next<Pong>(0).number, 1U);
  agent_.send("one");
  (void)peer_.next<Broken>(1);
  const uint32_t first = peer_.ping();
  agent_.send("one");
  EXPECT_EQ(peer_.ping(), first + 1);
  EXPECT_EQ(agent_.at("one").ends(), 0U);
}

TEST_F(ADialer, APongThatWasNotAskedForEndsTheConnection) {
  peer_.say(0, Pong{.number = 7});
  EXPECT_THAT(agent_.at("one").end(), HasSubstr("Pong 7"));
}

TEST_F(ADialer, WhoAnswersPingsAndNotWhatItWasAskedIsCutOff) {
  agent_.with("one", [](Link& link) { link.ask<Prepare>(Attached{}); });
  (void)peer_.next<Attached>(1);
  const Reject reject = peer_.next<Reject>(1);
  EXPECT_EQ(reject.code, ErrorCode::kUnavailable);
  EXPECT_EQ(reject.text, "Attached was not answered within 2 s");
  EXPECT_EQ(agent_.at("one").end(), "inference/0 has not answered Attached within 2 s");
  EXPECT_EQ(connections(), before_ + 1) << "the connection is there for others";
}

TEST_F(ADialer, WhoAnswersInTimeIsNotCutOff) {
  agent_.with("one", [](Link& link) { link.ask<Broken>(Attached{}); });
  (void)peer_.next<Attached>(1);
  peer_.say(1, kWord);
  agent_.at("one").wait_frames(1);
  agent_.send("one");
  (void)peer_.next<Broken>(1);
  (void)peer_.ping();
  EXPECT_EQ(agent_.at("one").ends(), 0U);
}

TEST_F(ADialer, ItsEndEndsAllLinksOnce) {
  attach(3, "two");
  {
    const RawPeer gone = std::move(peer_);
  }
  for (const std::string session : {"one", "two"}) {
    EXPECT_EQ(agent_.at(session).end(), "inference/0 has closed its connection");
    EXPECT_EQ(agent_.at(session).ends(), 1U);
  }
}

TEST_F(ADialer, ItsProcessesDeathEndsAllLinksOnce) {
  attach(3, "two");
  IdleProcess process;
  agent_.with("one", [&](Link& link) { link.watch_process(process.incarnation()); });
  agent_.with("two", [&](Link& link) { link.watch_process(process.incarnation()); });
  process.kill();
  for (const std::string session : {"one", "two"}) {
    EXPECT_EQ(agent_.at(session).end(), "inference/0 has died");
    EXPECT_EQ(agent_.at(session).ends(), 1U);
  }
}

// The other way round: the agent dials, and the raw peer answers.
class AnAgentThatDials : public testing::Test {
 protected:
  AnAgentThatDials() {
    call("one");
    EXPECT_TRUE(wait_ready(listener_.get(), POLLIN, soon()));
    peer_.emplace(accept_connection(listener_.get()));
    EXPECT_EQ(peer_->next<Hello>(0).job, "trainer");
  }
  void call(const std::string& session) {
    agent_.agent().call({.address = address_, .name = "inference/0", .incarnation = self_}, attach_to(session), soon(),
                        [&](std::shared_ptr<Link> link) { agent_.at(session).adopt(std::move(link)); });
  }
  void welcome() {
    peer_->say(
        0, Welcome{.protocol = kProtocolMax, .release = kVersion, .job = "inference", .rank = 0, .incarnation = self_});
  }

  const int64_t before_ = connections();
  LinkedAgent agent_{"trainer", 0};
  const Incarnation self_ = Incarnation::next();
  const std::string address_ = agent_.agent().address() + "-raw";
  const UniqueFd listener_ = listen_unix(address_);
  std::optional<RawPeer> peer_;
};

TEST_F(AnAgentThatDials, AttachesAllThatHasWaitedOnceItIsWelcomed) {
  call("two");
  welcome();
  EXPECT_EQ(peer_->next<Attach>(1).session, "one");
  EXPECT_EQ(peer_->next<Attach>(3).session, "two");
  EXPECT_EQ(connections(), before_ + 1);
}

TEST_F(AnAgentThatDials, SaysGoodbyeOnceItHasNoLink) {
  welcome();
  (void)peer_->next<Attach>(1);
  agent_.close("one");
  (void)peer_->next<Closed>(1);
  (void)peer_->next<Goodbye>(0);
  // The other side's Attach has crossed it.
  agent_.open("two");
  peer_->say(2, attach_to("two"));
  (void)agent_.at("two").link();
  agent_.send("two");
  (void)peer_->next<Broken>(2);
  peer_->say(2, Detach{});
  (void)peer_->next<Goodbye>(0);
  peer_.reset();
  expect_connections(before_);
}

TEST_F(AnAgentThatDials, OpensNoLinkAfterItsGoodbye) {
  welcome();
  (void)peer_->next<Attach>(1);
  agent_.close("one");
  (void)peer_->next<Closed>(1);
  (void)peer_->next<Goodbye>(0);
  call("two");
  EXPECT_TRUE(wait_ready(listener_.get(), POLLIN, soon())) << "it dials again";
  EXPECT_EQ(connections(), before_ + 2);
}

TEST_F(AnAgentThatDials, ClosesTheSocketWhereItHasNotBeenWelcomed) {
  agent_.close("one");
  EXPECT_TRUE(peer_->closed());
  expect_connections(before_);
}

TEST_F(AnAgentThatDials, RefusesAnotherProcessThanItCalled) {
  peer_->say(0, Welcome{.protocol = kProtocolMax,
                        .release = kVersion,
                        .job = "inference",
                        .rank = 0,
                        .incarnation = Incarnation::next()});
  EXPECT_THAT(peer_->next<Reject>(0).text, HasSubstr("is pid"));
  EXPECT_THAT(agent_.at("one").end(), HasSubstr("inference/0: is pid"));
}

}  // namespace
}  // namespace tessera
