#include "device/virtual/virtual_world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "device/testing.h"

namespace tessera::device {
namespace {

constexpr Order kOrders[] = {Order::kRandom, Order::kLatestFirst, Order::kEarliestFirst};

Operation appending(std::vector<std::string>& seen, const std::string& text) {
  return call([&seen, text] { seen.push_back(text); });
}

// Every rank publishes a value a step; every rank gathers all ranks' values on one stream, adds them up on another, and
// says that it is done with the step before any rank overwrites its value. Returns the sums of rank 0. Leaves out one
// of the waits, if it is told to.
enum class LeftOut { kNothing, kPublished, kRetired, kEvent };

struct Ring {
  static constexpr int kRanks = 3;
  static constexpr uint64_t kSteps = 6;
  TestWord published[kRanks], retired[kRanks];
  uint64_t value[kRanks] = {};

  std::vector<uint64_t> run(VirtualWorld& world, LeftOut left_out) {
    std::vector<uint64_t> sums(kSteps);
    world.run(kRanks, [&](int rank) { host(world.device(rank), static_cast<size_t>(rank), sums, left_out); });
    return sums;
  }

  void host(Device& device, size_t rank, std::vector<uint64_t>& sums, LeftOut left_out) {
    const auto gather = device.make_stream({.name = "gather"});
    const auto fold = device.make_stream({.name = "fold"});
    uint64_t gathered[kRanks] = {};
    for (uint64_t step = 1; step <= kSteps; ++step) {
      for (TestWord& word : retired)
        if (left_out != LeftOut::kRetired) device.wait_host(*word.reaches(step - 1, "retire"), soon());
      value[rank] = step * 100 + rank;
      published[rank].set(step);
      for (size_t q = 0; q < kRanks; ++q) {
        std::vector<std::shared_ptr<const Condition>> after;
        if (left_out != LeftOut::kPublished) after.push_back(published[q].reaches(step, "publish"));
        gather->enqueue({.name = "gather", .after = after, .body = [this, &gathered, q] { gathered[q] = value[q]; }});
      }
      if (left_out != LeftOut::kEvent) fold->wait(gather->record());
      fold->enqueue({.name = "fold", .body = [this, &gathered, &sums, rank, step] {
                       uint64_t sum = 0;
                       for (const uint64_t one : gathered) sum += one;
                       if (rank == 0) sums[step - 1] = sum;
                       retired[rank].set(step);
                     }});
      gather->wait(fold->record());
    }
    fold->synchronize(soon());
    gather->synchronize(soon());
  }
};

std::vector<uint64_t> right_sums() {
  std::vector<uint64_t> sums;
  for (uint64_t step = 1; step <= Ring::kSteps; ++step) sums.push_back(step * 300 + 3);
  return sums;
}

TEST(VirtualWorld, WhatIsOrderedHasOneResultInEveryOrder) {
  for (const Order order : kOrders)
    for (uint64_t seed = 0; seed < 50; ++seed) {
      VirtualWorld world(seed, order);
      EXPECT_EQ(Ring().run(world, LeftOut::kNothing), right_sums()) << to_string(order) << ", seed " << seed;
      EXPECT_GT(world.steps(), Ring::kRanks * Ring::kSteps * (Ring::kRanks + 1));
    }
}

TEST(VirtualWorld, AWaitThatIsLeftOutIsFound) {
  for (const LeftOut left_out : {LeftOut::kPublished, LeftOut::kRetired, LeftOut::kEvent}) {
    int wrong = 0;
    for (const Order order : kOrders)
      for (uint64_t seed = 0; seed < 10; ++seed) {
        VirtualWorld world(seed, order);
        wrong += Ring().run(world, left_out) != right_sums() ? 1 : 0;
      }
    EXPECT_GT(wrong, 0) << static_cast<int>(left_out);
  }
}

std::vector<std::string> trace(uint64_t seed, Order order) {
  std::vector<std::string> seen;
  VirtualWorld world(seed, order);
  world.run(2, [&](int rank) {
    Device& device = world.device(rank);
    const std::string me = std::to_string(rank);
    const auto one = device.make_stream({.name = "one"});
    const auto two = device.make_stream({.name = "two"});
    for (int i = 0; i < 3; ++i) {
      one->enqueue(appending(seen, me + "a"));
      two->enqueue(appending(seen, me + "b"));
    }
    one->synchronize(soon());
    seen.push_back(me);
  });
  return seen;
}

TEST(VirtualWorld, ASeedIsAnOrder) {
  std::set<std::vector<std::string>> different;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    different.insert(trace(seed, Order::kRandom));
    EXPECT_EQ(trace(seed, Order::kRandom), trace(seed, Order::kRandom)) << seed;
  }
  EXPECT_GT(different.size(), 15u);
}

// Of the heads of queues: all of a stream whose operations are always a little later than those of the other.
TEST(VirtualWorld, TheLatestGoesFirst) {
  EXPECT_THAT(trace(1, Order::kLatestFirst),
              testing::ElementsAre("1b", "1b", "1b", "1a", "1a", "1a", "1", "0b", "0b", "0b", "0a", "0a", "0a", "0"));
}

// An operation runs before its host does anything else, and ranks take turns.
TEST(VirtualWorld, TheEarliestGoesFirst) {
  EXPECT_THAT(trace(1, Order::kEarliestFirst),
              testing::ElementsAre("0a", "1a", "0b", "1b", "0a", "1a", "0b", "1b", "0a", "1a", "0b", "0", "1b", "1"));
}

TEST(VirtualWorld, ADeadlockNamesEverythingThatIsBlocked) {
  TestWord word;
  VirtualWorld world(7, Order::kLatestFirst);
  int unwound = 0;
  const auto run = [&] {
    world.run(3, [&](int rank) {
      struct Guard {
        int& count;
        ~Guard() { ++count; }
      } const guard{unwound};
      Device& device = world.device(rank);
      if (rank == 2) return;
      const auto gather = device.make_stream({.name = "gather"});
      gather->enqueue({.name = "gather",
                       .subject = "wte.weight",
                       .after = {word.reaches(5, "rank 2 to publish version 5 of wte.weight")}});
      const auto fold = device.make_stream({.name = "fold"});
      fold->wait(gather->record());
      fold->enqueue(call([] {}));
      if (rank == 0) device.wait_host(*word.reaches(6, "rank 1 to retire version 6"), soon());
      if (rank == 1) fold->synchronize(soon());
    });
  };
  EXPECT_EQ(error_of(run),
            "deadline-exceeded: deadlock after 3 steps of virtual ranks (seed 7, latest first):\n"
            "  rank 0, host: waits for rank 1 to retire version 6\n"
            "  rank 1, host: waits for an event of stream fold\n"
            "  rank 1, stream gather: gather wte.weight waits for rank 2 to publish version 5 of wte.weight\n"
            "  rank 1, stream fold: waits for an event of stream gather; 1 more behind it\n"
            "  rank 0, stream gather: gather wte.weight waits for rank 2 to publish version 5 of wte.weight\n"
            "  rank 0, stream fold: waits for an event of stream gather; 1 more behind it");
  EXPECT_EQ(unwound, 3);
  int ran = 0;  // the world can be used again
  world.run(2, [&](int rank) {
    const auto stream = world.device(rank).make_stream({.name = "again"});
    stream->enqueue(call([&] { ++ran; }));
  });
  EXPECT_EQ(ran, 2);
}

TEST(VirtualWorld, AnOperationThatNobodyWaitsForMustRunToo) {
  TestWord word;
  VirtualWorld world(1);
  std::shared_ptr<Stream> stream;
  EXPECT_THAT(error_of([&] {
                world.run(1, [&](int) {
                  stream = world.device(0).make_stream({.name = "gather"});
                  stream->enqueue({.name = "gather", .after = {word.reaches(1, "a word")}});
                });
              }),
              testing::HasSubstr("rank 0, stream gather: gather waits for a word"));
  EXPECT_EQ(stream->status().code(), ErrorCode::kCancelled);
}

TEST(VirtualWorld, FailuresOfHostsAreReportedTogetherAfterTheOthersHaveEnded) {
  for (const Order order : kOrders) {
    VirtualWorld world(3, order);
    TestWord word;
    bool ended = false;
    EXPECT_EQ(error_of([&] {
                world.run(4, [&](int rank) {
                  if (rank == 1) throw Error(ErrorCode::kDataLoss, "the row is torn");
                  if (rank == 2) throw std::runtime_error("no idea");
                  if (rank == 3) word.set(1);
                  world.device(rank).wait_host(*word.reaches(1, "rank 3"), soon());
                  if (rank == 0) ended = true;
                });
              }),
              "data-loss: of 4 virtual ranks (seed 3, " + std::string(to_string(order)) +
                  "), these failed:\n  rank 1: the row is torn\n  rank 2: no idea");
    EXPECT_TRUE(ended);
  }
}

TEST(VirtualWorld, AFailureThatOthersWaitForIsInTheDeadlocksReport) {
  VirtualWorld world(3, Order::kEarliestFirst);
  TestWord word;
  EXPECT_THAT(error_of([&] {
                world.run(2, [&](int rank) {
                  if (rank == 1) throw Error(ErrorCode::kDataLoss, "the row is torn");
                  world.device(0).wait_host(*word.reaches(1, "rank 1"), soon());
                });
              }),
              testing::MatchesRegex("deadline-exceeded: deadlock after .* steps .*:\n  rank 1: the row is torn\n"
                                    "  rank 0, host: waits for rank 1"));
}

TEST(VirtualWorld, AHostMayWaitWhileAnExceptionUnwindsIt) {
  for (const Order order : kOrders) {
    VirtualWorld world(5, order);
    TestWord word;
    std::vector<int> ran(3);
    const std::string text = error_of([&] {
      world.run(3, [&](int rank) {
        Device& device = world.device(rank);
        const auto stream = device.make_stream({.name = "ends"});  // ends after what it was given
        stream->enqueue({.name = "late", .after = {word.reaches(3, "all ranks")}, .body = [&ran, rank] {
                           ran[static_cast<size_t>(rank)] = 1;
                         }});
        word.add(1);
        throw Error(ErrorCode::kDataLoss, "from " + std::to_string(rank));
      });
    });
    EXPECT_THAT(text, testing::HasSubstr("\n  rank 0: from 0\n  rank 1: from 1\n  rank 2: from 2"));
    EXPECT_THAT(ran, testing::ElementsAre(1, 1, 1));
  }
}

TEST(VirtualWorld, StreamsArePoisonedAsRealOnesAre) {
  for (const Order order : kOrders) {
    VirtualWorld world(5, order);
    bool later = false;
    world.run(1, [&](int) {
      Device& device = world.device(0);
      const auto stream = device.make_stream({.name = "gather"});
      const auto other = device.make_stream({.name = "other"});
      stream->enqueue({.name = "gather", .subject = "w", .after = {std::make_shared<LostCondition>()}});
      stream->enqueue(call([&] { later = true; }));
      other->wait(stream->record());
      EXPECT_EQ(error_of([&] { other->synchronize(soon()); }), "peer-lost: gather w: rank 2 is gone");
      EXPECT_EQ(stream->take_error().code(), ErrorCode::kPeerLost);
      stream->synchronize(soon());
      EXPECT_EQ(error_of([&] { device.wait_host(LostCondition(), soon()); }), "peer-lost: rank 2 is gone");
      device.caller()->enqueue({.name = "gather", .subject = "w", .after = {std::make_shared<LostCondition>()}});
      EXPECT_EQ(error_of([&] { device.caller()->synchronize(soon()); }), "peer-lost: gather w: rank 2 is gone");
    });
    EXPECT_FALSE(later);
  }
}

TEST(VirtualWorld, TheCallersStreamLetsOthersRunWhileItWaits) {
  for (const Order order : kOrders) {
    VirtualWorld world(5, order);
    TestWord word;
    std::vector<std::string> seen;
    world.run(2, [&](int rank) {
      Device& device = world.device(rank);
      const uint64_t turn = rank == 0 ? 1 : 0;
      Operation operation = appending(seen, std::to_string(rank));
      operation.after = {word.reaches(turn, "its turn")};
      device.caller()->enqueue(std::move(operation));
      word.add(1);
    });
    EXPECT_THAT(seen, testing::ElementsAre("1", "0"));
  }
}

TEST(VirtualWorld, OutsideOfARunHostWaitsRunOperations) {
  VirtualWorld world(1);
  Device& device = world.device(0);
  TestWord word;
  const auto stream = device.make_stream({.name = "gather"});
  int value = 0;
  stream->enqueue(call([&] { value = 1; }));
  EXPECT_EQ(value, 0);
  stream->synchronize(soon());
  EXPECT_EQ(value, 1);
  EXPECT_EQ(error_of([&] { device.wait_host(*word.reaches(1, "a word"), soon()); }),
            "deadline-exceeded: deadlock after 1 steps of virtual ranks (seed 1, random):\n"
            "  the caller of the world waits for a word");
}

TEST(VirtualWorld, HasRoomForManyRanks) {
  VirtualWorld world(9);
  TestWord word;
  world.run(64, [&](int rank) {
    const auto turn = static_cast<uint64_t>(rank);
    world.device(rank).wait_host(*word.reaches(turn, "its turn"), soon());
    EXPECT_EQ(word.get(), turn);
    word.add(1);
  });
  EXPECT_EQ(word.get(), 64u);
}

TEST(VirtualWorld, RecordsEachRank) {
  VirtualWorld world(2);
  std::map<int, int> operations;
  for (int rank = 0; rank < 2; ++rank)
    world.device(rank).recorder().start([&](std::unique_ptr<RecordBlock> block) {
      for (const Record& record : block->records())
        operations[record.rank] += record.kind == RecordKind::kOperation ? 1 : 0;
      return block;
    });
  world.run(2, [&](int rank) {
    const auto stream = world.device(rank).make_stream({.name = "gather"});
    for (int i = 0; i <= rank; ++i) stream->enqueue(call([] {}));
  });
  for (int rank = 0; rank < 2; ++rank) world.device(rank).recorder().stop();
  EXPECT_EQ(operations, (std::map<int, int>{{0, 1}, {1, 2}}));
}

}  // namespace
}  // namespace tessera::device
