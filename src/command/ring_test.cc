#include "command/ring.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "base/testing.h"
#include "base/thread.h"

namespace tessera {
namespace {

constexpr Duration kNoSpin{};

// A ring in memory of this process, its two ends, and access to write anything there.
template <typename Sync>
struct Ends {
  explicit Ends(size_t slots, Duration spin = kNoSpin) : memory(std::make_unique<RingSlot<Sync>[]>(slots)) {
    ring = {.header = &header, .slots = {memory.get(), slots}};
    producer.emplace(ring, spin);
    consumer.emplace(ring, spin);
  }
  RingState push(uint64_t id, std::span<const std::byte> payload = {}) {
    return producer->push({.incarnation = 7, .id = id, .type = 3}, payload, soon());
  }
  RingState try_push(uint64_t id) { return producer->try_push({.incarnation = 7, .id = id, .type = 3}, {}); }
  RingState try_pop() { return consumer->try_pop(record); }

  RingHeader<Sync> header;
  std::unique_ptr<RingSlot<Sync>[]> memory;
  BasicRing<Sync> ring;
  std::optional<RingProducer<Sync>> producer;
  std::optional<RingConsumer<Sync>> consumer;
  Record record;
};

TEST(CommandRing, ARecordOfEveryLengthArrivesAsItWas) {
  Ends<ProcessSync> ends(2);
  std::vector<std::byte> sent;
  for (size_t bytes = 0; bytes <= kMaxRecordPayload; ++bytes) {
    ASSERT_EQ(ends.push(bytes, sent), RingState::kReady);
    ASSERT_EQ(ends.try_pop(), RingState::kReady);
    EXPECT_EQ(ends.record.head.incarnation, 7u);
    EXPECT_EQ(ends.record.head.id, bytes);
    EXPECT_EQ(ends.record.head.type, 3u);
    ASSERT_TRUE(std::ranges::equal(ends.record.payload(), sent)) << bytes;
    sent.push_back(static_cast<std::byte>(bytes * 31 + 1));
  }
}

TEST(CommandRing, AFullRingRefusesAtOnceOrAtTheDeadline) {
  Ends<ProcessSync> ends(3);
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_EQ(ends.try_push(id), RingState::kReady);
  EXPECT_EQ(ends.ring.size(), 3u);
  EXPECT_EQ(ends.try_push(4), RingState::kNotYet);
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(1));
  EXPECT_EQ(ends.producer->push({.id = 4}, {}, deadline), RingState::kNotYet);
  EXPECT_TRUE(deadline.passed());
  EXPECT_EQ(ends.try_pop(), RingState::kReady);
  EXPECT_EQ(ends.try_push(4), RingState::kReady);
}

TEST(CommandRing, AnEmptyRingIsWaitedForUntilTheDeadline) {
  for (const Duration spin : {kNoSpin, Duration(std::chrono::microseconds(50))}) {
    Ends<ProcessSync> ends(1, spin);
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(1));
    EXPECT_EQ(ends.consumer->pop(ends.record, deadline), RingState::kNotYet);
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(ends.push(1), RingState::kReady);
    EXPECT_EQ(ends.consumer->pop(ends.record, deadline), RingState::kReady);  // a record that is there is not late
  }
}

TEST(CommandRing, WhatWasPushedBeforeTheEndIsPopped) {
  Ends<ProcessSync> ends(2);
  ASSERT_EQ(ends.push(1), RingState::kReady);
  ends.producer->close();
  EXPECT_EQ(ends.push(2), RingState::kEnded);
  EXPECT_EQ(ends.try_pop(), RingState::kReady);
  EXPECT_EQ(ends.try_pop(), RingState::kEnded);
}

TEST(CommandRing, AnOnlookerSeesWhatWaitsAndForHowLong) {
  Ends<ProcessSync> ends(2);
  const std::byte payload[5] = {};
  ASSERT_EQ(ends.push(1), RingState::kReady);
  ASSERT_EQ(ends.try_pop(), RingState::kReady);
  ASSERT_EQ(ends.push(2, payload), RingState::kReady);
  ASSERT_EQ(ends.push(3), RingState::kReady);
  const auto pending = ends.ring.pending();
  ASSERT_EQ(pending.size(), 2u);
  EXPECT_EQ(pending[0].head.id, 2u);
  EXPECT_EQ(pending[0].head.type, 3u);
  EXPECT_EQ(pending[0].bytes, 5u);
  EXPECT_GE(pending[0].age, pending[1].age);
  EXPECT_GT(pending[1].age, Duration::zero());
  EXPECT_EQ(pending[1].head.id, 3u);
  EXPECT_EQ(ends.try_pop(), RingState::kReady);
  EXPECT_EQ(ends.record.head.id, 2u);
}

struct CountingSync : ProcessSync {
  static inline std::atomic<int> wakes{0};
  static void wake(const Word& word) {
    ++wakes;
    ProcessSync::wake(word);
  }
};

TEST(CommandRing, NoCallIsMadeToWakeAnEndThatDoesNotSleep) {
  Ends<CountingSync> ends(4);
  CountingSync::wakes = 0;
  for (uint64_t id = 0; id < 100; ++id) {
    ASSERT_EQ(ends.try_push(id), RingState::kReady);
    ASSERT_EQ(ends.try_pop(), RingState::kReady);
  }
  EXPECT_EQ(CountingSync::wakes, 0);
  ends.header.consumer.asleep = 1;  // as a sleeping consumer leaves it
  for (uint64_t id = 0; id < 4; ++id) ASSERT_EQ(ends.try_push(id), RingState::kReady);
  EXPECT_EQ(CountingSync::wakes, 1);
}

// With ThreadSanitizer, also a check of memory order on real hardware.
TEST(CommandRing, ManyRecordsCrossTwoThreadsInOrder) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kRecords = 20'000;
#else
  constexpr uint64_t kRecords = 100'000;
#endif
  for (const Duration spin : {kNoSpin, Duration(std::chrono::microseconds(20))}) {
    Ends<ProcessSync> ends(8, spin);
    std::thread producer = start_thread("producer", [&] {
      uint64_t id = 1;
      while (id <= kRecords && ends.push(id, std::as_bytes(std::span(&id, 1))) == RingState::kReady) ++id;
      ends.producer->close();
    });
    uint64_t popped = 0;
    while (ends.consumer->pop(ends.record, soon()) == RingState::kReady) {
      uint64_t payload = 0;
      std::memcpy(&payload, ends.record.payload().data(), sizeof payload);
      ASSERT_EQ(ends.record.head.id, ++popped);
      ASSERT_EQ(payload, popped);
      ASSERT_LE(ends.ring.size(), 8u);
      if (popped % 1000 == 0) {
        ASSERT_LE(ends.ring.pending().size(), 8u);
      }
    }
    EXPECT_EQ(popped, kRecords);
    producer.join();
  }
}

// A ring of four, full, after one more record has gone through it.
struct FullRing : Ends<ProcessSync> {
  FullRing() : Ends(4) {
    EXPECT_EQ(push(1), RingState::kReady);
    EXPECT_EQ(try_pop(), RingState::kReady);
    for (uint64_t id = 2; id <= 5; ++id) EXPECT_EQ(push(id), RingState::kReady);
  }
};

TEST(CommandRing, AProducerThatScribblesBreaksTheRingAndNoMore) {
  struct Case {
    const char* name;
    void (*scribble)(FullRing&);
    RingState expected;
  };
  const Case cases[] = {
      {"nothing", [](FullRing&) {}, RingState::kReady},
      {"more pushed than slots", [](FullRing& r) { r.header.producer.count = 6; }, RingState::kBroken},
      {"fewer pushed than popped", [](FullRing& r) { r.header.producer.count = 0; }, RingState::kBroken},
      {"a record longer than its slot", [](FullRing& r) { r.memory[1].words[3] = uint64_t{0xFFFF} << 16; },
       RingState::kBroken},
      {"more behind the length", [](FullRing& r) { r.memory[1].words[3] = uint64_t{1} << 32; }, RingState::kBroken},
      {"words that are the consumer's own",
       [](FullRing& r) {
         r.header.consumer.count = 77;
         r.header.consumer.closed = r.header.consumer.asleep = 77;
       },
       RingState::kReady},
  };
  for (const Case& c : cases) {
    FullRing ring;
    c.scribble(ring);
    EXPECT_EQ(ring.try_pop(), c.expected) << c.name;
    EXPECT_LE(ring.ring.pending().size(), 4u) << c.name;
    EXPECT_LE(ring.ring.size(), 4u) << c.name;
  }
}

TEST(CommandRing, AConsumerThatScribblesBreaksTheRingAndNoMore) {
  struct Case {
    const char* name;
    uint64_t popped;
    RingState expected;
  };
  const Case cases[] = {{"as it was", 1, RingState::kNotYet},
                        {"all of them", 5, RingState::kReady},
                        {"more than were pushed", 6, RingState::kBroken},
                        {"fewer than before", 0, RingState::kBroken},
                        {"as many as can be written", ~uint64_t{0}, RingState::kBroken}};
  for (const Case& c : cases) {
    FullRing ring;
    ring.header.consumer.count = c.popped;
    EXPECT_EQ(ring.try_push(6), c.expected) << c.name;
  }
}

}  // namespace
}  // namespace tessera
