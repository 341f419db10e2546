#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "memory/host/shared_arena.h"
#include "tessera/error.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

bool all_zero(const SharedBuffer& buffer) {
  return std::all_of(buffer.data(), buffer.data() + buffer.size(), [](std::byte b) { return b == std::byte{0}; });
}

TEST(SharedHeap, RandomBlocksNeverOverlapAreAlignedAndZeroed) {
  std::mt19937_64 random(3);
  const auto pick = [&](size_t low, size_t high) { return std::uniform_int_distribution<size_t>(low, high)(random); };
  std::vector<SharedBuffer> live;
  for (int step = 0; step < 4000; ++step) {
    if (!live.empty() && pick(0, 9) < 4) {
      std::swap(live[pick(0, live.size() - 1)], live.back());
      live.pop_back();
      continue;
    }
    const size_t alignment = size_t{1} << pick(0, 12);
    SharedBuffer buffer = SharedHeap::process().allocate(pick(1, pick(0, 9) == 0 ? 200'000 : 500), alignment);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % alignment, 0u);
    ASSERT_TRUE(all_zero(buffer));
    std::memset(buffer.data(), 0xA5, buffer.size());  // an overlap would show as a nonzero block, here or below
    live.push_back(std::move(buffer));
  }
  std::map<const std::byte*, size_t> blocks;
  for (const SharedBuffer& buffer : live) blocks[buffer.data()] = buffer.size();
  const std::byte* end = nullptr;
  for (const auto& [data, size] : blocks) {
    EXPECT_GE(data, end);
    end = data + size;
  }
}

TEST(SharedArena, MergesFreedNeighboursBackIntoOneHole) {
  SharedArena arena(1, SharedArena::kHugePage);
  std::vector<std::byte*> blocks;
  while (std::byte* block = arena.allocate(10'000, 64)) blocks.push_back(block);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
  for (std::byte* block : blocks) arena.release(block);
  EXPECT_EQ(arena.allocate(arena.bytes(), 4096), arena.data());
}

TEST(SharedHeap, LocatesOnlyWhatOneBlockHolds) {
  const SharedBuffer buffer = SharedHeap::process().allocate(1000);
  const auto found = SharedHeap::process().locate(buffer.data() + 100, 900);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->arena->data() + found->offset, buffer.data() + 100);
  EXPECT_FALSE(SharedHeap::process().locate(buffer.data() + 100, 2000));
  int on_the_stack = 0;
  EXPECT_FALSE(SharedHeap::process().locate(&on_the_stack, sizeof(on_the_stack)));
}

TEST(SharedHeap, GivesLargeArenasBack) {
  SharedBuffer large = SharedHeap::process().allocate(SharedArena::kMinBytes * 2);
  unsigned char resident = 0;
  const auto is_mapped = [&resident, page = large.data()] { return ::mincore(page, 1, &resident) == 0; };
  EXPECT_TRUE(is_mapped());
  large = {};
  EXPECT_FALSE(is_mapped());
}

TEST(SharedHeap, SaysHowMuchIsMissingWhenMemoryIsShort) {
  try {
    SharedHeap::process().allocate(size_t{1} << 50);
    FAIL() << "a pebibyte was found";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted);
    EXPECT_NE(std::string(error.what()).find("1125899906842624 bytes wanted"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("MemAvailable"), std::string::npos) << error.what();
  }
}

TEST(SharedHeap, RefusesOddAlignmentAndGivesNothingForNothing) {
  EXPECT_THROW(SharedHeap::process().allocate(8, 3), Error);
  EXPECT_THROW(SharedHeap::process().allocate(8, 8192), Error);
  EXPECT_EQ(SharedHeap::process().allocate(0).data(), nullptr);
}

// The attempts of a peer that has the descriptor.
TEST(SharedArena, APeerCanNeitherWriteNorResize) {
  SharedArena arena(1, SharedArena::kHugePage);
  arena.data()[0] = std::byte{42};
  EXPECT_NE(::ftruncate(arena.fd_for_peer(), 0), 0);
  EXPECT_NE(::ftruncate(arena.fd_for_peer(), static_cast<off_t>(2 * arena.bytes())), 0);
  EXPECT_NE(::fallocate(arena.fd_for_peer(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_EQ(::pwrite(arena.fd_for_peer(), "x", 1, 0), -1);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd_for_peer(), 0), MAP_FAILED);
  EXPECT_NE(::fcntl(arena.fd_for_peer(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(arena.data()[0], std::byte{42});
  arena.data()[0] = std::byte{43};  // the owner still can
}

TEST(SharedArena, ManyThreadsMayLendItAtOnce) {
  constexpr int kThreads = 4;
  for (uint32_t round = 0; round < 200; ++round) {
    SharedArena arena(round, SharedArena::kHugePage);
    std::barrier together(kThreads);
    std::vector<std::thread> threads;
    std::atomic<int> lent = 0;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&] {
        together.arrive_and_wait();
        EXPECT_NO_THROW(lent += arena.fd_for_peer() >= 0 ? 1 : 0);
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(lent, kThreads);
    EXPECT_FALSE(arena.writable_elsewhere());
  }
}

TEST(SharedHeap, AForkedChildCannotHarmItsParentsBlocks) {
  SharedBuffer buffer = SharedHeap::process().allocate(4096);
  std::memset(buffer.data(), 7, buffer.size());
  const pid_t child = ::fork();
  if (child == 0) {
    buffer = {};
    int code = 1;
    try {
      SharedHeap::process().allocate(4096);
    } catch (const Error& error) {
      code = error.code() == ErrorCode::kInvalidArgument ? 0 : 2;
    }
    ::_exit(code);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(buffer.data()[4095], std::byte{7});
}

}  // namespace
}  // namespace tessera
