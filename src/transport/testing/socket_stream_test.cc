#include "transport/testing/socket_stream.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>

#include "base/socket.h"

namespace tessera {
namespace {

constexpr Duration kLongEnough = std::chrono::seconds(60);

struct Pair {
  explicit Pair(uint64_t seed, SocketStream::Disturbance of_producer = {}) {
    SocketPair sockets = socket_pair();
    of_producer.seed = seed;
    producer = std::make_unique<SocketStream>(std::move(sockets.first), of_producer);
    consumer = std::make_unique<SocketStream>(std::move(sockets.second), SocketStream::Disturbance{.seed = seed + 1});
  }
  std::unique_ptr<SocketStream> producer, consumer;
};

std::byte byte_at(uint32_t epoch, size_t frame, size_t at) {
  return static_cast<std::byte>(epoch * 7 + frame * 31 + at);
}

// Returns how many frames it could hand over.
size_t produce(SocketStream& stream, uint32_t epoch, size_t frames, size_t bytes) {
  stream.begin_produce(epoch);
  for (size_t f = 0; f < frames; ++f) {
    const std::span<std::byte> room = stream.reserve(Deadline::after(kLongEnough));
    if (room.empty()) return f;
    for (size_t i = 0; i < bytes; ++i) room[i] = byte_at(epoch, f, i);
    stream.publish(bytes);
  }
  return frames;
}

// Returns how many bytes differ from what was sent; a missing frame counts as one.
size_t consume(SocketStream& stream, uint32_t epoch, size_t frames, size_t bytes) {
  stream.begin_consume(epoch);
  size_t wrong = 0;
  for (size_t f = 0; f < frames; ++f) {
    const std::span<const std::byte> frame = stream.acquire(Deadline::after(kLongEnough));
    if (frame.size() != bytes) return wrong + frames - f;
    for (size_t i = 0; i < bytes; ++i) wrong += frame[i] != byte_at(epoch, f, i) ? 1 : 0;
    stream.release();
  }
  return wrong;
}

TEST(SocketStream, WhatArrivesIsWhatWasSentWhateverTheSeed) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Pair pair(seed);
    auto sent = std::async(std::launch::async, [&] {
      return produce(*pair.producer, 1, 12, ByteStream::kFrameBytes) + produce(*pair.producer, 2, 3, 100);
    });
    EXPECT_EQ(consume(*pair.consumer, 1, 12, ByteStream::kFrameBytes), 0U) << seed;
    EXPECT_EQ(consume(*pair.consumer, 2, 3, 100), 0U) << seed;
    EXPECT_EQ(sent.get(), 15U);
  }
}

TEST(SocketStream, AnAbortedTransferLeavesNothingToTheNext) {
  const Pair pair(3);
  auto sent = std::async(std::launch::async, [&] {
    const size_t frames = produce(*pair.producer, 1, 100, ByteStream::kFrameBytes);
    EXPECT_LT(frames, 100U);
    EXPECT_EQ(pair.producer->status().code(), ErrorCode::kCancelled);
    return produce(*pair.producer, 2, 4, 1000);
  });
  pair.consumer->begin_consume(1);
  EXPECT_EQ(pair.consumer->acquire(Deadline::after(kLongEnough)).size(), ByteStream::kFrameBytes);
  pair.producer->interrupt(Status(ErrorCode::kCancelled, "enough"));
  EXPECT_EQ(consume(*pair.consumer, 2, 4, 1000), 0U);
  EXPECT_EQ(sent.get(), 4U);
}

TEST(SocketStream, AByteMayArriveAsAnother) {
  const Pair pair(1, {.spoiled_byte = 5000});
  auto sent = std::async(std::launch::async, [&] { return produce(*pair.producer, 1, 10, 1000); });
  EXPECT_EQ(consume(*pair.consumer, 1, 10, 1000), 1U);
  EXPECT_EQ(sent.get(), 10U);
}

TEST(SocketStream, TheConnectionMayBeLost) {
  const Pair pair(1, {.lost_after = 5000});
  auto sent = std::async(std::launch::async, [&] { return produce(*pair.producer, 1, 10, 1000); });
  EXPECT_GT(consume(*pair.consumer, 1, 10, 1000), 0U);
  EXPECT_EQ(pair.consumer->status().code(), ErrorCode::kPeerLost);
  EXPECT_LT(sent.get(), 10U);
  EXPECT_EQ(pair.producer->status().code(), ErrorCode::kPeerLost);
}

TEST(SocketStream, AWaitEndsAtItsDeadlineOrWhenItIsInterrupted) {
  const Pair pair(1);
  pair.consumer->begin_consume(1);
  EXPECT_TRUE(pair.consumer->acquire(Deadline::after(std::chrono::milliseconds(1))).empty());
  EXPECT_EQ(pair.consumer->status(), Status());
  auto waiting =
      std::async(std::launch::async, [&] { return pair.consumer->acquire(Deadline::after(kLongEnough)).empty(); });
  pair.consumer->interrupt(Status(ErrorCode::kCancelled, "enough"));
  EXPECT_TRUE(waiting.get());
  EXPECT_EQ(pair.consumer->status().code(), ErrorCode::kCancelled);
}

}  // namespace
}  // namespace tessera
