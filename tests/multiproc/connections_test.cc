// Which ranks are connected, and that a loss reaches ranks without a connection to the lost one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "base/metrics.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::HasSubstr;

Side by_rows(Side side) {
  side.layout = std::to_string(side.world) + ":S0";
  return side;
}

class Connections : public JobsTest {
 protected:
  // A rank that moves three versions, and has the same number of connections after the first. Nobody closes before the
  // third, which is chosen once all have the second.
  void start_counting(const Side& side, int64_t expected) {
    start(side, [sends = side.sends, expected](Batch& batch, std::vector<float>&) {
      (sends ? batch.send() : batch.recv()).wait();
      const int64_t connections = Metrics::process().connections.value();
      for (int more = 0; more < 2; ++more) (sends ? batch.send() : batch.recv()).wait();
      if (connections == expected) return 0;
      std::fprintf(stderr, "%ld connections, not %ld\n", static_cast<long>(connections), static_cast<long>(expected));
      return 1;
    });
  }
  // A rank that dies once all have the first version, and the ranks that must learn of it: in the next version, or in
  // the one after that if they already have their part of it.
  void start_moving(const Side& side, Barrier& moved, bool dies) {
    start(by_rows(side), [&moved, dies, sends = side.sends](Batch& batch, std::vector<float>&) {
      (sends ? batch.send() : batch.recv()).wait();
      moved.pass();
      if (dies) return ::kill(::getpid(), SIGKILL);
      for (int more = 0; more < 2; ++more) (sends ? batch.send() : batch.recv()).wait();
      return 0;
    });
  }
};

// Rank 0 of the receivers is connected with every sender and every rank of its job.
TEST_F(Connections, AreThoseThatRoutesNeed) {
  constexpr int kWorld = 4;
  for (Rank rank = 0; rank < kWorld; ++rank) {
    start_counting(by_rows(trainer(rank, kWorld)), rank == 0 ? 1 : 2);
    start_counting(by_rows(inference(rank, kWorld)), rank == 0 ? kWorld + kWorld - 1 : 2);
  }
  expect_all_well();
}

TEST_F(Connections, ARankThatHoldsNothingOfABatchIsInStep) {
  const auto run = [&](const std::string& job, Rank rank, int world) {
    const bool sends = job == "trainer";
    Bus bus({.job = job, .rank = rank, .world = world, .store = store_, .threads = 1});
    Pair pair = bus.pair({.name = "weights", .peer = sends ? "inference" : "trainer"});
    const bool holds = sends || rank == 0;
    std::vector<float> data(holds ? 64 : 0, sends ? 1.0F : 0.0F);
    const TensorSpec tensor{.name = "weight",
                            .data = holds ? data.data() : nullptr,
                            .shape = {64},
                            .layout = Layout::parse(sends ? "1:R" : "1@0:R")};
    Batch batch = sends ? pair.offer("policy", {&tensor, 1}) : pair.accept("policy", {&tensor, 1});
    for (int64_t version = 1; version <= 3; ++version) {
      if (!sends) batch.wait_version(version);
      if ((sends ? batch.send() : batch.recv()).wait() != version) return 1;
    }
    return holds && data != std::vector<float>(64, 1.0F) ? 2 : 0;
  };
  start("trainer/0", [&] { return run("trainer", 0, 1); });
  for (const Rank rank : {0, 1, 2})
    start("inference/" + std::to_string(rank), [&, rank] { return run("inference", rank, 3); });
  expect_all_well();
}

TEST_F(Connections, ADeadReceiverIsHeardOfByASenderThatItReadNothingFrom) {
  Barrier moved;
  for (const Rank rank : {0, 1}) {
    start_moving(trainer(rank), moved, false);
    start_moving(inference(rank), moved, rank == 1);
  }
  moved.open();
  EXPECT_EQ(of("inference/1").status, -SIGKILL);
  for (const char* name : {"trainer/0", "trainer/1", "inference/0"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("inference/1")) << name;
  }
  expect_all_well();
}

TEST_F(Connections, ADeadSenderIsHeardOfByAReceiverThatReadNothingFromIt) {
  Barrier moved;
  for (const Rank rank : {0, 1}) {
    start_moving(trainer(rank), moved, rank == 0);
    start_moving(inference(rank), moved, false);
  }
  moved.open();
  EXPECT_EQ(of("trainer/0").status, -SIGKILL);
  for (const char* name : {"trainer/1", "inference/0", "inference/1"}) {
    EXPECT_EQ(of(name).status, kPeerLost) << of(name).output;
    EXPECT_THAT(of(name).output, HasSubstr("trainer/0")) << name;
  }
  expect_all_well();
}

}  // namespace
}  // namespace tessera::test
