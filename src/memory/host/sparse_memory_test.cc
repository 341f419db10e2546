#include "memory/host/sparse_memory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera {
namespace {

constexpr size_t kBytes = size_t{1} << 30;

size_t taken_bytes(const SharedArena& arena) {
  struct stat file{};
  EXPECT_EQ(::fstat(arena.fd_for_agent(), &file), 0);
  return static_cast<size_t>(file.st_blocks) * 512;
}

TEST(SparseMemory, TakesWhatItIsToldToAndNoMore) {
  std::optional<SparseMemory> memory(std::in_place, kBytes, "trainer/0");
  const auto location = SharedHeap::process().locate(memory->data(), kBytes);
  ASSERT_TRUE(location);
  EXPECT_EQ(taken_bytes(*location->arena), 0U);
  ASSERT_TRUE(memory->take(kBytes - 100'000, 100'000));
  ASSERT_TRUE(memory->take(5000, 1));
  EXPECT_GE(taken_bytes(*location->arena), 100'000U);
  EXPECT_LT(taken_bytes(*location->arena), 8U << 20);  // huge pages, where memfds have them
  std::byte* const end = memory->data() + kBytes;
  EXPECT_TRUE(std::all_of(end - 100'000, end, [](std::byte b) { return b == std::byte{0}; }));
  std::memset(end - 100'000, 1, 100'000);
  ASSERT_TRUE(memory->take(kBytes - 100'000, 100'000));
  EXPECT_EQ(end[-1], std::byte{1});
}

// A peer may get it. Then nobody else can write it, and it can still grow.
TEST(SparseMemory, GrowsUnderSealsToo) {
  SparseMemory memory(kBytes, "trainer/0");
  const auto location = SharedHeap::process().locate(memory.data(), kBytes);
  ASSERT_TRUE(location);
  location->arena->fd_for_peer();
  EXPECT_FALSE(location->arena->writable_elsewhere());
  ASSERT_TRUE(memory.take(0, 10'000));
  std::memset(memory.data(), 1, 10'000);
  EXPECT_EQ(memory.data()[9'999], std::byte{1});
}

TEST(SparseMemory, EndsWithItsOwner) {
  const std::byte* data = nullptr;
  {
    const SparseMemory memory(kBytes, "trainer/0");
    data = memory.data();
  }
  EXPECT_FALSE(SharedHeap::process().locate(data, 1));
}

}  // namespace
}  // namespace tessera
