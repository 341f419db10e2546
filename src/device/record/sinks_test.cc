// Programs that are run, recorded and checked: what no run shows, the check finds in any of them.
#include "device/record/sinks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "device/cpu_device.h"
#include "device/record/check.h"
#include "device/testing.h"
#include "device/virtual/virtual_world.h"

namespace tessera::device {
namespace {

enum class Lacks { kNothing, kPublished, kRetired, kGathered, kUsed };

constexpr uint64_t kPublishedWord = 1;
constexpr uint64_t kRetiredWord = 2;

// Two ranks: each publishes its rows, gathers the other's, and computes with them, three versions long.
class Exchange {
 public:
  explicit Exchange(Lacks lacks) : lacks_(lacks) {}

  void describe(Device& device) {
    for (int rank = 0; rank < 2; ++rank)
      device.recorder().add_region(of(rank).rows.data(), of(rank).rows.size(), {.owner = rank, .number = 1}, "rows");
  }

  void run(Device& device, int rank) {
    Rank& own = of(rank);
    const auto publish = device.make_stream({.name = "publish"});
    const auto gather = device.make_stream({.name = "gather"});
    const auto compute = device.make_stream({.name = "compute"});
    Event used;
    for (uint64_t version = 1; version <= 3; ++version) {
      publish->enqueue(publish_of(rank, version));
      if (lacks_ != Lacks::kUsed) gather->wait(used);
      gather->enqueue(gather_of(rank, version));
      if (lacks_ != Lacks::kGathered) compute->wait(gather->record());
      compute->enqueue({.name = "gemm", .accesses = {read_of(own.gathered.data(), own.gathered.size(), version)}});
      used = compute->record();
    }
    for (const auto& stream : {publish, gather, compute}) device.wait_host(stream->record(), soon());
  }

 private:
  struct Rank {
    std::array<std::byte, 64> rows{};
    std::array<std::byte, 64> gathered{};
    TestWord published;
    TestWord retired;
  };

  Rank& of(int rank) { return ranks_[static_cast<size_t>(rank)]; }

  Operation publish_of(int rank, uint64_t version) {
    Rank& own = of(rank);
    Operation operation{.name = "publish",
                        .accesses = {write_of(own.rows.data(), own.rows.size(), version)},
                        .body = [&own, version] { own.published.set(version); },
                        .writes = {{.rank = rank, .word = kPublishedWord, .value = version}}};
    const WordEdge retired{.rank = 1 - rank, .word = kRetiredWord, .value = version - 1};
    if (version > 1 && lacks_ != Lacks::kRetired)
      operation.after.push_back(of(1 - rank).retired.reaches(retired.value, "retired", retired));
    return operation;
  }
  Operation gather_of(int rank, uint64_t version) {
    Rank& own = of(rank);
    Rank& peer = of(1 - rank);
    Operation operation{.name = "gather",
                        .accesses = {read_of(peer.rows.data(), peer.rows.size(), version),
                                     write_of(own.gathered.data(), own.gathered.size(), version)},
                        .body = [&own, version] { own.retired.set(version); },
                        .writes = {{.rank = rank, .word = kRetiredWord, .value = version}}};
    const WordEdge published{.rank = 1 - rank, .word = kPublishedWord, .value = version};
    if (lacks_ != Lacks::kPublished) operation.after.push_back(peer.published.reaches(version, "published", published));
    return operation;
  }

  const Lacks lacks_;
  std::array<Rank, 2> ranks_;
};

std::vector<RankLog> new_logs() {
  std::vector<RankLog> logs;
  for (int rank = 0; rank < 2; ++rank) logs.emplace_back(LogHead{.run = 1, .rank = rank, .ranks = 2});
  return logs;
}

CheckReport check_virtual(Lacks lacks, uint64_t seed, Order order) {
  Exchange exchange(lacks);
  std::vector<RankLog> logs = new_logs();
  VirtualWorld world(seed, order);
  for (int rank = 0; rank < 2; ++rank) {
    exchange.describe(world.device(rank));
    world.device(rank).recorder().start(sink_to(logs[static_cast<size_t>(rank)]));
  }
  world.run(2, [&](int rank) { exchange.run(world.device(rank), rank); });
  for (int rank = 0; rank < 2; ++rank) world.device(rank).recorder().stop();
  return check_schedule(logs);
}

bool conflicts_between(const CheckReport& report, std::string_view first, std::string_view second) {
  return !report.conflicts.empty() && std::ranges::all_of(report.conflicts, [&](const Conflict& conflict) {
    return conflict.first.operation == first && conflict.second.operation == second;
  });
}

TEST(RecordedPrograms, AreAcceptedAndRefusedWhateverTheOrderOfTheRun) {
  for (const Order order : {Order::kRandom, Order::kLatestFirst, Order::kEarliestFirst})
    for (uint64_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE(testing::Message() << to_string(order) << ", seed " << seed);
      const auto check = [&](Lacks lacks) { return check_virtual(lacks, seed, order); };
      const CheckReport right = check(Lacks::kNothing);
      EXPECT_TRUE(right.ok());
      EXPECT_EQ(right.accesses, 2u * 3 * 4);
      EXPECT_EQ(right.unreached, 0u);
      EXPECT_TRUE(conflicts_between(check(Lacks::kRetired), "gather", "publish"));
      EXPECT_TRUE(conflicts_between(check(Lacks::kUsed), "gemm", "gather"));
      EXPECT_FALSE(check(Lacks::kPublished).conflicts.empty());
      EXPECT_FALSE(check(Lacks::kGathered).conflicts.empty());
    }
}

TEST(RecordedPrograms, OfThreadsGoToFiles) {
  char name[] = "/tmp/tessera-sinks-XXXXXX";
  const std::filesystem::path folder = ::mkdtemp(name);
  Exchange exchange(Lacks::kNothing);
  const std::vector<RankLog> heads = new_logs();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      CpuDevice device({.rank = rank});
      LogFile file(folder / std::to_string(rank), heads[static_cast<size_t>(rank)].head());
      exchange.describe(device);
      device.recorder().start(sink_to(file));
      exchange.run(device, rank);
      device.recorder().stop();
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<RankLog> logs;
  for (int rank = 0; rank < 2; ++rank) logs.push_back(read_log(folder / std::to_string(rank)));
  const CheckReport report = check_schedule(logs);
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.accesses, 2u * 3 * 4);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera::device
