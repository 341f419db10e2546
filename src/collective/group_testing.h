// For tests: the ranks of a group as threads of this process, each with a device of its own.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fail.h"
#include "base/testing.h"
#include "base/thread.h"
#include "collective/group.h"
#include "device/cpu_device.h"
#include "device/virtual/virtual_world.h"

namespace tessera::collective {

// A runtime folder of this process's own, while it lives.
class TestRuntimeFolder {
 public:
  TestRuntimeFolder()
      : path_(std::filesystem::temp_directory_path() / ("tessera-group." + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
    ::setenv("TESSERA_RUNTIME_DIR", path_.c_str(), 1);
  }
  ~TestRuntimeFolder() {
    ::unsetenv("TESSERA_RUNTIME_DIR");
    std::filesystem::remove_all(path_);
  }
  TestRuntimeFolder(const TestRuntimeFolder&) = delete;
  TestRuntimeFolder& operator=(const TestRuntimeFolder&) = delete;
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

struct TestRanks {
  int size = 2;
  bool sockets = false;  // each rank as a process would be: a service thread, descriptors, mapped pages
  Duration timeout = std::chrono::seconds(60);
  uint32_t slots = 64;
  bool closes = true;  // after the body, if that threw nothing
  // What differs on a rank.
  std::function<void(GroupOptions&)> change = [](GroupOptions&) {};
};

// How each rank's body, or forming the group, ended.
inline std::vector<Status> run_ranks(const TestRanks& ranks, const std::function<void(Group&)>& body) {
  std::unique_ptr<TestRuntimeFolder> folder;
  if (ranks.sockets) folder = std::make_unique<TestRuntimeFolder>();
  InProcessExchange exchange(ranks.size);
  std::vector<Status> statuses(static_cast<size_t>(ranks.size));
  const auto run = [&](int rank) {
    device::CpuDevice device({.rank = rank});
    GroupOptions options{.rank = rank,
                         .size = ranks.size,
                         .name = "test",
                         .timeout = ranks.timeout,
                         .device = &device,
                         .slots = ranks.slots,
                         .in_process = !ranks.sockets};
    ranks.change(options);
    const auto group = Group::form(exchange.of_rank(rank, device, ranks.timeout), options);
    body(*group);
    if (ranks.closes) group->close(soon());
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks.size; ++rank)
    threads.push_back(start_thread("rank", [&, rank] {
      try {
        run(rank);
      } catch (...) {
        statuses[static_cast<size_t>(rank)] = status_of_current_exception();
      }
    }));
  for (std::thread& thread : threads) thread.join();
  if (folder != nullptr) {
    EXPECT_TRUE(folder->empty()) << "sockets are left over";
  }
  return statuses;
}

// The same where no rank may fail.
inline void run_ranks_well(const TestRanks& ranks, const std::function<void(Group&)>& body) {
  const std::vector<Status> statuses = run_ranks(ranks, body);
  for (size_t rank = 0; rank < statuses.size(); ++rank)
    EXPECT_TRUE(statuses[rank].ok()) << "rank " << rank << ": " << statuses[rank].message();
}

// The same on simulated ranks, in an order that the seed chooses. Throws what they throw.
inline void run_virtual_ranks(int size, uint64_t seed, const std::function<void(Group&)>& body) {
  constexpr device::Order kOrders[] = {device::Order::kRandom, device::Order::kLatestFirst,
                                       device::Order::kEarliestFirst};
  device::VirtualWorld world(seed, kOrders[seed % std::size(kOrders)]);
  InProcessExchange exchange(size);
  world.run(size, [&](int rank) {
    device::Device& device = world.device(rank);
    const auto group = Group::form(
        exchange.of_rank(rank, device, std::chrono::seconds(60)),
        {.rank = rank, .size = size, .name = "virtual", .device = &device, .slots = 16, .in_process = true});
    body(*group);
    group->close(soon());
  });
}

}  // namespace tessera::collective
