#include "bus/registration/rendezvous.h"

#include <gtest/gtest.h>

#include <chrono>
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

}  // namespace
}  // namespace tessera::bus
