#include "bus/registration/rendezvous.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "peer/wait_list.h"
#include "store/test_util.h"

namespace tessera::bus {
namespace {

constexpr Duration kClaimLimit = seconds(30);

// For example in another pid namespace: only its lease tells whether it is there.
TEST(Claim, OfARankWhoseHolderCannotBeSeenWaitsForTheEndOfItsLease) {
  const std::unique_ptr<store::Server> server = store::tcp_server();
  const std::unique_ptr<Store> store = open_store(server->address());
  WaitList waits;
  EventLoop loop("test");
  const auto rank_of = [&](Incarnation incarnation) {
    return std::make_unique<Rendezvous>(
        *store, Identity{.name_space = "test", .job = "trainer", .rank = 0, .world = 1},
        RankRecord{
            .incarnation = std::move(incarnation), .world = 1, .address = "/nowhere", .release = "test", .worker = {}},
        waits, loop);
  };
  Incarnation elsewhere = Incarnation::next();
  ++elsewhere.pid_namespace;
  std::unique_ptr<Rendezvous> holder = rank_of(elsewhere);
  holder->claim({.deadline = Deadline::after(kClaimLimit), .stop = {}});
  const auto second = rank_of(Incarnation::next());
  try {
    second->claim({.deadline = Deadline::after(seconds(0.05)), .stop = {}});
    ADD_FAILURE() << "two hold one rank";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadlineExceeded);
    EXPECT_NE(std::string(error.what()).find("missing: the end of the lease of trainer/0"), std::string::npos)
        << error.what();
  }
  std::thread leaves = start_thread("holder", [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    holder.reset();
  });
  EXPECT_NO_THROW(second->claim({.deadline = Deadline::after(kClaimLimit), .stop = {}}));
  leaves.join();
}

// torchrun has ended it, wherever it was.
TEST(Claim, OfARestartedJobDoesNotWaitForLeasesOfTheEarlierOne) {
  const std::unique_ptr<store::Server> server = store::tcp_server();
  const std::unique_ptr<Store> store = open_store(server->address());
  WaitList waits;
  EventLoop loop("test");
  const auto rank_of = [&](uint32_t restart) {
    Incarnation elsewhere = Incarnation::next();
    ++elsewhere.pid_namespace;
    elsewhere.restart = restart;
    return std::make_unique<Rendezvous>(
        *store, Identity{.name_space = "test", .job = "trainer", .rank = 0, .world = 1},
        RankRecord{
            .incarnation = std::move(elsewhere), .world = 1, .address = "/nowhere", .release = "test", .worker = {}},
        waits, loop);
  };
  const auto claim = [](Rendezvous& rank) { rank.claim({.deadline = Deadline::after(seconds(0.05)), .stop = {}}); };
  const auto first = rank_of(0), second = rank_of(1), third = rank_of(1);
  claim(*first);
  EXPECT_NO_THROW(claim(*second));
  EXPECT_THROW(claim(*third), Error) << "as young as the holder";
  EXPECT_THROW(claim(*first), Error) << "older than the holder";
}

// Two ranks of an engine that has two trainers, each of which a thread of its own joins.
class TwoTrainers : public testing::Test {
 protected:
  struct Member {
    Member(Store& store, EventLoop& loop, const std::string& job, Rank rank, int world)
        : rendezvous(store, {.name_space = "test", .job = job, .rank = rank, .world = world},
                     {.incarnation = Incarnation::next(),
                      .world = world,
                      .address = "/nowhere",
                      .release = "test",
                      .worker = {}},
                     waits, loop) {
      rendezvous.claim(limits());
    }
    static CallLimits limits() { return {.deadline = Deadline::after(seconds(120)), .stop = {}}; }
    std::future<PairView> join(const std::string& peer) {
      return std::async(std::launch::async, [this, peer] { return rendezvous.join("weights", peer, limits()); });
    }
    // Returns once it waits since the engine's ranks name different trainers.
    void await_division() {
      const auto divided = [](const Wait& wait) {
        return wait.text.find("joins a pair with job") != std::string::npos;
      };
      for (const Deadline limit = Deadline::after(seconds(60)); !std::ranges::any_of(waits.now(), divided);) {
        ASSERT_FALSE(limit.passed());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }

    WaitList waits;
    Rendezvous rendezvous;
  };

  const std::unique_ptr<store::Server> server_ = store::tcp_server();
  const std::unique_ptr<Store> store_ = open_store(server_->address());
  EventLoop loop_{"test"};
  Member first_{*store_, loop_, "engine", 0, 2}, second_{*store_, loop_, "engine", 1, 2};
};

TEST_F(TwoTrainers, AreJoinedInADifferentOrderOnEachRank) {
  Member trainer0(*store_, loop_, "trainer0", 0, 1), trainer1(*store_, loop_, "trainer1", 0, 1);
  std::future<PairView> joins[] = {first_.join("trainer0"), second_.join("trainer1"), trainer0.join("engine"),
                                   trainer1.join("engine")};
  for (Member* member : {&first_, &second_, &trainer0, &trainer1}) member->await_division();
  std::future<PairView> others[] = {first_.join("trainer1"), second_.join("trainer0")};
  for (auto& join : joins) EXPECT_NO_THROW(join.get());
  for (auto& join : others) EXPECT_NO_THROW(join.get());
}

TEST_F(TwoTrainers, AreAMistakeIfEachRankJoinsOnlyOneOfThem) {
  std::future<PairView> joins[] = {first_.join("trainer0"), second_.join("trainer1")};
  for (auto& join : joins) {
    try {
      join.get();
      ADD_FAILURE() << "joined";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      EXPECT_STREQ(error.what(), "pair weights: engine/1 joins a pair with job trainer1, but engine/0 with trainer0");
    }
  }
}

}  // namespace
}  // namespace tessera::bus
