#include "transport/shm/bounce_ring.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "base/thread.h"

namespace tessera {
namespace {

constexpr Duration kPatience = std::chrono::seconds(30);

struct Ends {
  std::unique_ptr<BounceRing> consumer = BounceRing::create();
  std::unique_ptr<BounceRing> producer = BounceRing::open(UniqueFd(::dup(consumer->fd())), "inference/0");

  void begin(uint32_t epoch) {
    consumer->begin_consume(epoch);
    producer->begin_produce(epoch);
  }
};

bool send(BounceRing& ring, uint32_t value, size_t bytes) {
  const auto slot = ring.reserve(Deadline::after(kPatience));
  if (slot.empty()) return false;
  std::memcpy(slot.data(), &value, sizeof(value));
  ring.publish(bytes);
  return true;
}

TEST(BounceRing, DeliversFramesInOrderAcrossManyStreams) {
  Ends ends;
  constexpr uint32_t kFrames = 1000;
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    ends.begin(epoch);
    bool sent = true;
    std::thread producer = start_thread("producer", [&] {
      for (uint32_t frame = 0; frame < kFrames; ++frame) sent = sent && send(*ends.producer, epoch * frame, 4 + frame);
    });
    for (uint32_t frame = 0; frame < kFrames; ++frame) {
      const auto got = ends.consumer->acquire(Deadline::after(kPatience));
      if (got.size() != 4 + frame) break;
      uint32_t value = 0;
      std::memcpy(&value, got.data(), sizeof(value));
      if (value != epoch * frame) break;
      ends.consumer->release();
      if (frame + 1 == kFrames) SUCCEED();
    }
    producer.join();
    EXPECT_TRUE(sent);
  }
}

TEST(BounceRing, TheProducerWaitsWhenTheRingIsFull) {
  Ends ends;
  ends.begin(1);
  for (uint32_t frame = 0; frame < BounceRing::kSlots; ++frame) ASSERT_TRUE(send(*ends.producer, frame, 4));
  EXPECT_TRUE(ends.producer->reserve(Deadline::after(Duration::zero())).empty());
  EXPECT_EQ(ends.producer->status(), Status());
  EXPECT_EQ(ends.consumer->acquire(Deadline::after(kPatience)).size(), 4u);
  ends.consumer->release();
  EXPECT_FALSE(ends.producer->reserve(Deadline::after(kPatience)).empty());
}

TEST(BounceRing, NothingMovesUntilBothHaveBegunTheSameStream) {
  Ends ends;
  ends.begin(1);
  ASSERT_TRUE(send(*ends.producer, 1, 4));
  ends.consumer->begin_consume(2);  // the first stream was given up: its frame must not be taken for the second one's
  EXPECT_TRUE(ends.consumer->acquire(Deadline::after(Duration::zero())).empty());
  ends.producer->begin_produce(2);
  ASSERT_TRUE(send(*ends.producer, 2, 8));
  EXPECT_EQ(ends.consumer->acquire(Deadline::after(kPatience)).size(), 8u);
}

TEST(BounceRing, AnInterruptEndsAWaitUnderWayAndTheFirstReasonStays) {
  Ends ends;
  ends.begin(1);
  std::thread waiter =
      start_thread("waiter", [&] { EXPECT_TRUE(ends.consumer->acquire(Deadline::after(kPatience)).empty()); });
  ends.consumer->interrupt(Status(ErrorCode::kPeerLost, "it died"));
  ends.consumer->interrupt(Status(ErrorCode::kCancelled, "too late"));
  waiter.join();
  EXPECT_EQ(ends.consumer->status().code(), ErrorCode::kPeerLost);
  ends.begin(2);
  EXPECT_EQ(ends.consumer->status(), Status());
}

TEST(BounceRing, AHostileProducerCanSpoilTheDataButNotTheReader) {
  const auto consumer = BounceRing::create();
  std::byte* raw =
      static_cast<std::byte*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, consumer->fd(), 0));
  ASSERT_NE(raw, MAP_FAILED);
  consumer->begin_consume(1);
  const uint64_t position = uint64_t{1} << 32 | 77;  // 77 frames at once, each of 0xFFFFFFFF bytes
  std::memset(raw + 64, 0xFF, 4096 - 64);
  std::memcpy(raw, &position, sizeof(position));
  const auto frame = consumer->acquire(Deadline::after(kPatience));
  EXPECT_TRUE(frame.empty());
  EXPECT_EQ(consumer->status().code(), ErrorCode::kDataLoss);
  ::munmap(raw, 4096);
}

TEST(BounceRing, RefusesAFileThatCouldShrinkOrHasAnotherSize) {
  UniqueFd unsealed(::memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096 + BounceRing::kSlots * BounceRing::kSlotBytes), 0);
  EXPECT_THROW(BounceRing::open(UniqueFd(::dup(unsealed.get())), "trainer/0"), Error);
  UniqueFd small(::memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(small.get(), 4096), 0);
  ASSERT_EQ(::fcntl(small.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_THROW(BounceRing::open(UniqueFd(::dup(small.get())), "trainer/0"), Error);
  EXPECT_THROW(BounceRing::open(UniqueFd(), "trainer/0"), Error);
}

}  // namespace
}  // namespace tessera
