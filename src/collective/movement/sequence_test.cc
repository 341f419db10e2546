#include "collective/movement/sequence.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "base/thread.h"

namespace tessera::collective {
namespace {

// Words that one thread writes and another reads, as a copy from another process does: each whole, in any order.
using Words = std::array<uint64_t, 61>;

void write(Words& words, uint64_t value) {
  for (uint64_t& word : words) std::atomic_ref(word).store(value, std::memory_order_relaxed);
}

Words read(Words& words) {
  Words found{};
  for (size_t i = 0; i < words.size(); ++i) found.at(i) = std::atomic_ref(words.at(i)).load(std::memory_order_relaxed);
  return found;
}

TEST(Sequence, WhatIsReadBetweenEqualEvenCountsIsWhole) {
  constexpr uint64_t kWrites = 20'000;
  alignas(64) static uint64_t count;
  alignas(64) static Words words;
  const auto counted = [] { return std::atomic_ref(count).load(std::memory_order_relaxed); };
  std::thread writer = start_thread("tessera-writer", [] {
    for (uint64_t value = 1; value <= kWrites; ++value) {
      set_sequence(count, 2 * value - 1);
      write(words, value);
      set_sequence(count, 2 * value);
    }
  });
  uint64_t last = 0;
  uint64_t whole = 0;
  while (last < 2 * kWrites) {
    const uint64_t before = counted();
    read_in_order();
    const Words found = read(words);
    read_in_order();
    ASSERT_GE(before, last);
    last = before;
    if (before % 2 != 0 || counted() != before) continue;
    ++whole;
    for (const uint64_t value : found) ASSERT_EQ(2 * value, before);
  }
  writer.join();
  EXPECT_GE(whole, 1U);
}

}  // namespace
}  // namespace tessera::collective
