// Two agents, and the connection that their links share.
#include "peer/agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "peer/peer_testing.h"

namespace tessera {
namespace {

class TwoAgents : public testing::Test {
 protected:
  const int64_t before_ = connections();
  LinkedAgent one_{"trainer", 0};
  LinkedAgent two_{"trainer", 1};
};

// Checks that the link of that session is attached at both ends.
void expect_linked(LinkedAgent& one, LinkedAgent& two, const std::string& session) {
  const size_t heard = two.at(session).frames();
  (void)two.at(session).link();
  one.send(session);
  two.at(session).wait_frames(heard + 1);
}

TEST_F(TwoAgents, ShareAConnectionWhicheverCalls) {
  for (const std::string session : {"a", "b"}) two_.open(session);
  one_.open("c");
  one_.call(two_, "a");
  one_.call(two_, "b");
  expect_linked(one_, two_, "a");
  expect_linked(one_, two_, "b");
  two_.call(one_, "c");
  expect_linked(two_, one_, "c");
  EXPECT_EQ(connections(), before_ + 2) << "one socket, both ends of which are here";
  one_.close("a");
  one_.close("b");
  EXPECT_EQ(two_.at("b").end(), "trainer/0 has closed its connection");
  expect_linked(two_, one_, "c");
  two_.close("c");
  expect_connections(before_);
  one_.call(two_, "d");
  two_.open("d");
  expect_linked(one_, two_, "d");
}

TEST_F(TwoAgents, ThreadsThatCallAtOnceShareOne) {
  std::vector<std::string> sessions;
  for (int i = 0; i < 8; ++i) sessions.push_back(fmt::format("s{}", i));
  for (const std::string& session : sessions) two_.open(session);
  std::vector<std::thread> threads;
  for (const std::string& session : sessions) threads.emplace_back([&] { one_.call(two_, session); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& session : sessions) expect_linked(one_, two_, session);
  EXPECT_EQ(connections(), before_ + 2);
}

// In some rounds both dial before the other's call arrives, in others not.
TEST_F(TwoAgents, MayCallEachOtherAtOnce) {
  for (int round = 0; round < 20; ++round) {
    const std::string there = fmt::format("there{}", round);
    const std::string back = fmt::format("back{}", round);
    two_.open(there);
    one_.open(back);
    std::thread other([&] { two_.call(one_, back); });
    one_.call(two_, there);
    other.join();
    expect_linked(one_, two_, there);
    expect_linked(two_, one_, back);
    one_.close(there);
    two_.close(back);
    expect_connections(before_);
  }
}

TEST_F(TwoAgents, ACallMayComeBeforeTheSession) {
  one_.call(two_, "late");
  one_.call(two_, "soon");
  two_.open("soon");
  expect_linked(one_, two_, "soon");
  two_.open("late");
  expect_linked(one_, two_, "late");
  EXPECT_EQ(connections(), before_ + 2);
}

TEST_F(TwoAgents, AnAgentThatEndsEndsItsLinks) {
  {
    LinkedAgent third("trainer", 2);
    two_.open("a");
    two_.open("b");
    third.call(two_, "a");
    third.call(two_, "b");
    expect_linked(third, two_, "a");
    expect_linked(third, two_, "b");
  }
  EXPECT_EQ(two_.at("a").end(), "trainer/2 has closed its connection");
  EXPECT_EQ(two_.at("b").end(), "trainer/2 has closed its connection");
  expect_connections(before_);
}

}  // namespace
}  // namespace tessera
