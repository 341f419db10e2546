#include "etp/schedule/cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "base/testing.h"
#include "etp/schedule/cache_testing.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Keys, AreEqualForBuffersThatAreInterchangeable) {
  const WeightFormat bf16(DType::kBF16);
  const WeightFormat nvfp4(Format::kNvfp4);
  const WeightFormat mxfp8(Format::kMxfp8);
  EXPECT_EQ(gather_key(64, 32, bf16, Plane::kRow, {}), gather_key(64, 32, bf16, Plane::kColumn, DType::kBF16));
  EXPECT_EQ(gather_key(64, 32, nvfp4, Plane::kRow, {}), gather_key(64, 32, nvfp4, Plane::kColumn, {}));
  EXPECT_NE(gather_key(64, 32, mxfp8, Plane::kRow, {}), gather_key(64, 32, mxfp8, Plane::kColumn, {}));
  EXPECT_EQ(gather_key(64, 32, nvfp4, Plane::kRow, DType::kBF16).bytes(), 64 * 32 * 2);
  EXPECT_EQ(gather_key(64, 32, bf16, Plane::kRow, {}).bytes(), 64 * 32 * 2);
  EXPECT_EQ(gather_key(64, 32, mxfp8, Plane::kColumn, {}).bytes(), 64 * 32 + 2 * 32);
  BufferKey expert = gather_key(64, 32, nvfp4, Plane::kRow, DType::kBF16);
  expert.expert = 3;
  EXPECT_EQ(to_string(expert), "gather 64x32 nvfp4 row as bf16, expert 3, UNGRAPHED, group 0");

  // Each member counts.
  std::vector<BufferKey> keys(10, gather_key(64, 32, mxfp8, Plane::kRow, DType::kBF16));
  keys[1].rows = 32;
  keys[2].columns = 64;
  keys[3].format = nvfp4;
  keys[4].plane = Plane::kColumn;
  keys[5].decoded = DType::kF32;
  keys[6].use = BufferUse::kReduce;
  keys[7].expert = 0;
  keys[8].chain = Chain::kGraphed;
  keys[9].group = 1;
  std::set<size_t> hashes;
  std::set<std::string> texts;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(keys[i], keys[j]);
    hashes.insert(std::hash<BufferKey>()(keys[i]));
    texts.insert(to_string(keys[i]));
  }
  EXPECT_EQ(hashes.size(), keys.size());
  EXPECT_EQ(texts.size(), keys.size());
}

TEST(Cache, ReservingTakesNoMemoryAndGettingTwiceIsOneBuffer) {
  Arena arena;
  BufferCache cache(arena.memory());
  const BufferTicket a = cache.reserve(key_of(16), "a");
  const BufferTicket b = cache.reserve(key_of(16), "b");
  EXPECT_EQ(arena.buffers(), 0U);
  EXPECT_FALSE(cache.holds(a));
  const LentBuffer lent = cache.get(a);
  EXPECT_EQ(lent.bytes, 16 * 8 * 4);
  EXPECT_EQ(lent.wait_for, nullptr);
  EXPECT_EQ(cache.get(a).memory, lent.memory);
  EXPECT_NE(cache.get(b).memory, lent.memory);
  EXPECT_TRUE(cache.holds(a));
  EXPECT_EQ(arena.buffers(), 2U);
}

TEST(Cache, WhoGetsAReleasedBufferIsToldItsLastReader) {
  Arena arena;
  BufferCache cache(arena.memory());
  const BufferTicket a = cache.reserve(key_of(16), "a");
  const BufferTicket b = cache.reserve(key_of(16), "b");
  std::byte* const memory = cache.get(a).memory;
  const LastReader event = std::make_shared<int>(7);
  cache.release(a, event);
  const LentBuffer lent = cache.get(b);
  EXPECT_EQ(lent.memory, memory);
  EXPECT_EQ(lent.wait_for, event);
  EXPECT_NE(cache.get(a).memory, memory);  // b holds it
  cache.release(b, event);
  cache.clear();
  EXPECT_EQ(arena.freed_after, std::vector{event});
}

TEST(Cache, UnknownTicketsAndDoubleReleasesAreErrors) {
  Arena arena;
  BufferCache cache(arena.memory());
  EXPECT_THAT(error_of([&] { cache.get({}); }), HasSubstr("ticket 0 is unknown"));
  const BufferTicket a = cache.reserve(key_of(16), "layers.0.weight");
  EXPECT_THAT(error_of([&] { cache.get({2}); }), AllOf(HasSubstr("ticket 2"), HasSubstr("1 to 1")));
  EXPECT_THAT(error_of([&] { cache.holds({9}); }), HasSubstr("ticket 9"));
  EXPECT_THAT(error_of([&] { cache.release(a, {}); }), AllOf(HasSubstr("ticket 1"), HasSubstr("layers.0.weight")));
  cache.get(a);
  cache.release(a, {});
  EXPECT_THAT(error_of([&] { cache.release(a, {}); }), HasSubstr("no buffer"));
  EXPECT_THAT(error_of([&] { cache.reserve(key_of(0), "w"); }), HasSubstr("without elements"));
}

TEST(Cache, ClearFreesWhatIsFreeAtOnceAndTheRestWhenItIsReleased) {
  Arena arena;
  BufferCache cache(arena.memory());
  const BufferTicket a = cache.reserve(key_of(16), "a");
  const BufferTicket b = cache.reserve(key_of(16), "b");
  std::byte* const held = cache.get(a).memory;
  cache.get(b);
  cache.release(b, {});
  cache.clear();
  EXPECT_EQ(arena.buffers(), 1U);
  EXPECT_EQ(cache.get(a).memory, held);
  cache.release(a, {});
  EXPECT_EQ(arena.buffers(), 0U);
  EXPECT_NE(cache.get(a).memory, nullptr);  // tickets stay valid
  EXPECT_NE(cache.get(b).memory, nullptr);
}

TEST(Cache, APoolShrinksByWhatAWholeStepDidNotUse) {
  Arena arena;
  BufferCache cache(arena.memory());
  std::vector<BufferTicket> tickets;
  for (int i = 0; i < 6; ++i) tickets.push_back(cache.reserve(key_of(16), "w"));
  for (const BufferTicket ticket : tickets) cache.get(ticket);  // an unusual step
  for (const BufferTicket ticket : tickets) cache.release(ticket, {});
  EXPECT_EQ(cache.end_step(), 0);
  EXPECT_EQ(arena.buffers(), 6U);
  const auto ordinary_step = [&] {
    for (const BufferTicket ticket : tickets) {
      cache.get(ticket);
      cache.release(ticket, {});
    }
  };
  ordinary_step();
  EXPECT_EQ(cache.end_step(), 5 * 16 * 8 * 4);
  EXPECT_EQ(arena.buffers(), 1U);
  const int64_t allocations = cache.report().allocations;
  for (int i = 0; i < 10; ++i) {
    ordinary_step();
    EXPECT_EQ(cache.end_step(), 0);
  }
  EXPECT_EQ(cache.report().allocations, allocations);
  cache.get(tickets[0]);  // held over a step
  EXPECT_EQ(cache.end_step() + cache.end_step(), 0);
  cache.release(tickets[0], {});
  EXPECT_EQ(cache.end_step(), 0);  // the step that it was released in used it
  EXPECT_EQ(cache.end_step(), 16 * 8 * 4);
}

TEST(Cache, GraphedBuffersMoveToACapturePoolAndKeepTheirAddresses) {
  Arena arena;
  Arena capture;
  BufferCache cache(arena.memory());
  const BufferTicket outside = cache.reserve(key_of(16), "outside");
  std::vector<BufferTicket> graphed;
  for (int i = 0; i < 3; ++i)
    graphed.push_back(cache.reserve(key_of(16, Chain::kGraphed), "layers." + std::to_string(i)));
  cache.get(outside);
  for (const BufferTicket ticket : graphed) cache.get(ticket);
  EXPECT_THAT(error_of([&] { cache.reallocate(capture.memory()); }), HasSubstr("layers.0"));
  for (const BufferTicket ticket : graphed) cache.release(ticket, {});
  cache.reallocate(capture.memory());
  EXPECT_EQ(arena.buffers(), 1U);
  EXPECT_EQ(capture.buffers(), 3U);

  std::vector<std::byte*> captured;
  for (const BufferTicket ticket : graphed) captured.push_back(cache.get(ticket).memory);
  EXPECT_EQ(capture.buffers(), 3U);
  EXPECT_EQ(std::set(captured.begin(), captured.end()).size(), 3U);
  for (const BufferTicket ticket : graphed) cache.release(ticket, {});
  EXPECT_EQ(cache.end_step() + cache.end_step(), 0);  // a replay gets nothing, but uses them
  for (const size_t i : {2U, 0U, 1U}) EXPECT_EQ(cache.get(graphed[i]).memory, captured[i]);
  for (const BufferTicket ticket : graphed) cache.release(ticket, {});

  Arena other;
  cache.reallocate(other.memory());
  EXPECT_EQ(capture.buffers(), 0U);
  EXPECT_EQ(other.buffers(), 3U);
  cache.clear();
  EXPECT_EQ(other.buffers(), 0U);
  EXPECT_TRUE(other.freed_after.size() == 3 && cache.holds(outside));
}

TEST(Cache, CapturedTicketsKeepTheirAddressesAndShareThem) {
  Arena arena;
  BufferCache cache(arena.memory());
  const auto reserve = [&] { return cache.reserve(key_of(16, Chain::kGraphed), "w"); };
  const BufferTicket one = reserve(), two = reserve(), outside = reserve();
  const auto last = std::make_shared<int>(0);
  std::byte* const address = cache.capture(one).memory;
  cache.release(one, last);
  EXPECT_EQ(cache.capture(two).memory, address);
  EXPECT_FALSE(cache.is_free(one));
  EXPECT_THAT(error_of([&] { cache.get(one); }), HasSubstr("something else is there"));
  cache.put_back(two);
  EXPECT_TRUE(cache.is_free(one));
  EXPECT_EQ(cache.get(one).wait_for, last);
  cache.put_back(one);
  EXPECT_NE(cache.get(outside).memory, address);
  cache.release(outside, {});
  EXPECT_EQ(cache.end_step(), 0);
  EXPECT_EQ(cache.end_step(), key_of(16).bytes());
  EXPECT_EQ(cache.report().captured_bytes, key_of(16).bytes());
  EXPECT_THAT(error_of([&] { cache.reallocate(arena.memory()); }), HasSubstr("before anything is captured"));
  cache.uncapture(one);
  EXPECT_NE(cache.get(outside).memory, address);
  cache.release(outside, {});
  cache.uncapture(two);
  EXPECT_EQ(cache.report().captured_bytes, 0);
  EXPECT_GT(cache.end_step() + cache.end_step(), 0);
  EXPECT_EQ(arena.buffers(), 0U);
}

TEST(Cache, AccountsForAllBytes) {
  Arena arena;
  BufferCache cache(arena.memory());
  const BufferTicket a = cache.reserve(key_of(16), "a");
  const BufferTicket a2 = cache.reserve(key_of(32, Chain::kGraphed), "a");
  cache.reserve(key_of(48), "never");
  cache.get(a);
  cache.get(a2);
  cache.release(a, {});
  const CacheReport report = cache.report();
  EXPECT_EQ(report.bytes, (16 + 32) * 32);
  EXPECT_EQ(report.held_bytes, 32 * 32);
  EXPECT_EQ(report.chain_bytes[static_cast<size_t>(Chain::kGraphed)], 32 * 32);
  EXPECT_EQ(report.chain_bytes[static_cast<size_t>(Chain::kUngraphed)], 16 * 32);
  ASSERT_EQ(report.pools.size(), 2U);
  EXPECT_EQ(report.pools[0].key, key_of(16));
  EXPECT_EQ(report.pools[0].held, 0);
  EXPECT_EQ(report.pools[0].most_held, 1);
  ASSERT_EQ(report.weights.size(), 1U);
  EXPECT_EQ(report.weights[0].name, "a");
  EXPECT_EQ(report.weights[0].held_bytes, 32 * 32);
  EXPECT_EQ(report.weights[0].most_held_bytes, (16 + 32) * 32);
}

TEST(Cache, BelowACapIdleBuffersOfOtherKeysMakeRoomTheOldestFirst) {
  Arena arena;
  BufferCache cache(arena.memory(), (16 + 32 + 48) * 32);
  const std::array tickets{cache.reserve(key_of(16), "a"), cache.reserve(key_of(32), "b"),
                           cache.reserve(key_of(48), "c")};
  std::vector<std::byte*> memory;
  for (const BufferTicket ticket : tickets) memory.push_back(cache.get(ticket).memory);
  for (const size_t i : {1, 0, 2}) cache.release(tickets.at(i), std::make_shared<size_t>(i));
  EXPECT_EQ(arena.bytes(), (16 + 32 + 48) * 32);
  const BufferTicket one_more = cache.reserve(key_of(16), "a");
  cache.get(tickets[0]);
  EXPECT_TRUE(arena.freed.empty());  // its own was idle
  cache.get(one_more);
  EXPECT_EQ(arena.freed, std::vector{memory[1]});
  EXPECT_EQ(*std::static_pointer_cast<size_t>(arena.freed_after[0]), 1U);
  EXPECT_EQ(cache.report().over_cap, 0);
  // What is held makes no room.
  cache.get(cache.reserve(key_of(80), "d"));
  EXPECT_EQ(arena.freed, (std::vector{memory[1], memory[2]}));
  EXPECT_EQ(cache.report().bytes, (16 + 16 + 80) * 32);
  EXPECT_EQ(cache.report().over_cap, 1);
}

TEST(Cache, WhatAListNeedsStaysWhenRoomIsMadeForIt) {
  Arena arena;
  BufferCache cache(arena.memory(), (16 + 32 + 48) * 32);
  const BufferTicket a = cache.reserve(key_of(16), "a");
  const BufferTicket b = cache.reserve(key_of(32), "b");
  const BufferTicket c = cache.reserve(key_of(48), "c");
  std::vector<std::byte*> memory;
  for (const BufferTicket ticket : {a, b, c}) {
    memory.push_back(cache.get(ticket).memory);
    cache.release(ticket, {});
  }
  const std::array keys{key_of(64), key_of(16)};
  cache.make_room(keys);
  EXPECT_EQ(arena.freed, (std::vector{memory[1], memory[2]}));  // not that of `a`, which is older
  EXPECT_EQ(cache.get(a).memory, memory[0]);
  cache.get(cache.reserve(key_of(64), "d"));
  EXPECT_EQ(cache.report().over_cap, 0);
}

TEST(Cache, BuffersOfACapturePoolMakeNoRoom) {
  Arena arena, pool;
  BufferCache cache(arena.memory(), 16 * 32);
  const BufferTicket captured = cache.reserve(key_of(16, Chain::kGraphed), "a");
  cache.get(captured);
  cache.release(captured, {});
  cache.reallocate(pool.memory());
  cache.get(cache.reserve(key_of(16), "b"));
  EXPECT_EQ(pool.buffers(), 1U);
  EXPECT_EQ(cache.report().over_cap, 1);
}

TEST(Cache, CapturedBuffersMakeNoRoomAndTakeTheirShareOfTheCap) {
  Arena arena;
  BufferCache cache(arena.memory(), (16 + 16 + 32) * 32);
  const BufferTicket captured = cache.reserve(key_of(16), "a");
  const BufferTicket outside = cache.reserve(key_of(16), "a");
  std::byte* const kept = cache.capture(captured).memory;
  std::byte* const idle = cache.get(outside).memory;
  cache.put_back(captured);
  cache.release(outside, {});
  EXPECT_EQ(cache.kept_bytes(), 16 * 32);
  cache.get(cache.reserve(key_of(48), "b"));
  EXPECT_EQ(arena.freed, std::vector{idle});  // though that of the capture is older
  EXPECT_EQ(cache.report().over_cap, 0);
  EXPECT_EQ(cache.kept_bytes(), (16 + 48) * 32);
  // To others it is no buffer of their own, so there is none for them below the cap.
  EXPECT_NE(cache.get(outside).memory, kept);
  EXPECT_EQ(cache.report().over_cap, 1);
  cache.release(outside, {});
  cache.uncapture(captured);
  EXPECT_EQ(cache.kept_bytes(), 48 * 32);
  cache.get(cache.reserve(key_of(32), "c"));
  EXPECT_EQ(arena.buffers(), 2U);
}

TEST(Cache, RoomForACaptureIsMadeOnlyWhereItHasNoBufferYet) {
  Arena arena;
  BufferCache cache(arena.memory(), (16 + 32) * 32);
  const BufferTicket one = cache.reserve(key_of(16), "a");
  const BufferTicket other = cache.reserve(key_of(32), "b");
  std::byte* const address = cache.capture(one).memory;
  cache.put_back(one);
  std::byte* const idle = cache.get(other).memory;
  cache.release(other, {});
  const std::array keys{key_of(16)};
  cache.make_room(keys, true);
  EXPECT_TRUE(arena.freed.empty());
  EXPECT_EQ(cache.capture(cache.reserve(key_of(16), "a")).memory, address);
  cache.make_room(keys, true);
  EXPECT_EQ(arena.freed, std::vector{idle});
}

}  // namespace
}  // namespace tessera::etp
