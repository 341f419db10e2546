#include "base/framing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/socket.h"
#include "base/testing.h"

namespace tessera {
namespace {

using testing::HasSubstr;

constexpr uint32_t kMagic = 0x41424344;

std::vector<std::byte> payload_of(size_t size, uint8_t seed = 1) {
  std::vector<std::byte> payload(size);
  for (size_t i = 0; i < size; ++i) payload[i] = static_cast<std::byte>(seed + i);
  return payload;
}

std::vector<std::byte> header(uint32_t magic, uint32_t length, uint16_t fds = 0, uint16_t check = 0,
                              uint32_t stream = 0) {
  ByteWriter out;
  out.put(magic);
  out.put<uint16_t>(1);
  out.put<uint16_t>(2);
  out.put(stream);
  out.put(length);
  out.put(fds);
  out.put(check);
  return out.take();
}

TEST(FramingTest, FramesArriveInOrderWithTheirTypesAndVersions) {
  const SocketPair pair = socket_pair();
  FrameWriter writer(kMagic, 1, 1 << 20);
  writer.push(10, payload_of(5));
  writer.set_version(2);
  writer.push(11, {});
  EXPECT_TRUE(writer.flush(pair.first.get()));

  FrameReader reader(kMagic, {});
  const Frame first = wait_frame(pair.second.get(), reader, soon());
  EXPECT_EQ(first.type, 10);
  EXPECT_EQ(first.version, 1);
  EXPECT_EQ(first.payload, payload_of(5));
  const Frame second = wait_frame(pair.second.get(), reader, soon());
  EXPECT_EQ(second.type, 11);
  EXPECT_EQ(second.version, 2);
  EXPECT_TRUE(second.payload.empty());
}

TEST(FramingTest, AFrameMayArriveByteByByte) {
  const SocketPair pair = socket_pair();
  std::vector<std::byte> stream = header(kMagic, 100);
  const std::vector<std::byte> payload = payload_of(100);
  stream.insert(stream.end(), payload.begin(), payload.end());
  FrameReader reader(kMagic, {});
  for (size_t i = 0; i < stream.size(); ++i) {
    EXPECT_FALSE(reader.next());
    ASSERT_EQ(send_some(pair.first.get(), std::span(stream).subspan(i, 1)), 1U);
    ASSERT_TRUE(reader.fill(pair.second.get()));
  }
  const auto frame = reader.next();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->payload, payload);
}

TEST(FramingTest, LargeAndSmallFramesPassAFullSocketInOrder) {
  const SocketPair pair = socket_pair();
  std::mt19937 random(1);
  std::vector<size_t> sizes;
  for (int i = 0; i < 200; ++i) sizes.push_back(random() % (i % 10 == 0 ? 2'000'000 : 2'000));
  std::thread sender([&] {
    FrameWriter writer(kMagic, 1, size_t{1} << 30);
    for (size_t i = 0; i < sizes.size(); ++i) writer.push(static_cast<uint16_t>(i), payload_of(sizes[i]));
    writer.flush(pair.first.get(), soon());
  });
  FrameReader reader(kMagic, {.payload_bytes = 2'000'000});
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Frame frame = wait_frame(pair.second.get(), reader, soon());
    ASSERT_EQ(frame.type, i);
    ASSERT_EQ(frame.payload, payload_of(sizes[i]));
  }
  sender.join();
}

TEST(FramingTest, DescriptorsStayWithTheirFrame) {
  const SocketPair pair = socket_pair();
  FrameWriter writer(kMagic, 1, 1 << 20);
  const auto some_fds = [&](size_t count) {
    std::vector<UniqueFd> fds;
    for (size_t i = 0; i < count; ++i) fds.push_back(duplicate_fd(pair.first.get()));
    return fds;
  };
  writer.push(1, payload_of(3), some_fds(2));
  writer.push(2, payload_of(3));
  writer.push(3, payload_of(3), some_fds(kMaxFdsPerMessage));
  EXPECT_TRUE(writer.flush(pair.first.get()));
  FrameReader reader(kMagic, {.payload_bytes = 100, .fds = kMaxFdsPerMessage});
  EXPECT_EQ(wait_frame(pair.second.get(), reader, soon()).fds.size(), 2U);
  EXPECT_EQ(wait_frame(pair.second.get(), reader, soon()).fds.size(), 0U);
  EXPECT_EQ(wait_frame(pair.second.get(), reader, soon()).fds.size(), kMaxFdsPerMessage);
}

TEST(FramingTest, TheQueueIsBoundedButOneFrameAlwaysFits) {
  const SocketPair pair = socket_pair();
  FrameWriter writer(kMagic, 1, 1000);
  writer.push(1, payload_of(5000));
  EXPECT_THAT(error_of([&] { writer.push(1, payload_of(1)); }), HasSubstr("a peer that does not read"));
  EXPECT_EQ(writer.queued_bytes(), 5000 + kFrameHeaderBytes);
  EXPECT_TRUE(writer.flush(pair.first.get()));
  EXPECT_EQ(writer.queued_bytes(), 0U);
  EXPECT_NO_THROW(writer.push(1, payload_of(1)));
}

TEST(FramingTest, EachStreamIsBoundedByWhatIsItsOwn) {
  const SocketPair pair = socket_pair();
  FrameWriter writer(kMagic, 1, 1000);
  writer.push(1, payload_of(5000), {}, 1);
  EXPECT_NO_THROW(writer.push(2, payload_of(900), {}, 2)) << "another one's backlog is not its own";
  EXPECT_THAT(error_of([&] { writer.push(2, payload_of(900), {}, 2); }), HasSubstr("920 bytes wait"));
  EXPECT_THAT(error_of([&] { writer.push(1, payload_of(1), {}, 1); }), HasSubstr("5020 bytes wait"));
  writer.push_last(3, payload_of(1), 1);
  EXPECT_TRUE(writer.flush(pair.first.get()));

  FrameReader reader(kMagic, {}, [](uint32_t) { return FrameLimits{}; });
  std::vector<std::pair<uint16_t, uint32_t>> arrived;
  while (arrived.size() < 3) {
    const Frame frame = wait_frame(pair.second.get(), reader, soon());
    arrived.emplace_back(frame.type, frame.stream);
  }
  EXPECT_THAT(arrived, testing::ElementsAre(testing::Pair(1, 1U), testing::Pair(2, 2U), testing::Pair(3, 1U)));
}

TEST(FramingTest, EachStreamHasLimitsOfItsOwn) {
  const FrameLimits widest{.payload_bytes = 100, .fds = 1};
  const auto limits_of = [&](uint32_t stream) { return stream == 1 ? widest : FrameLimits{.payload_bytes = 10}; };
  const auto read = [&](uint32_t stream, size_t bytes, bool with_fd) {
    const SocketPair pair = socket_pair();
    std::vector<UniqueFd> fds;
    if (with_fd) fds.push_back(duplicate_fd(pair.first.get()));
    FrameWriter writer(kMagic, 1, 1000);
    writer.push(1, payload_of(bytes), std::move(fds), stream);
    EXPECT_TRUE(writer.flush(pair.first.get()));
    const size_t before = open_fds();
    std::string error;
    {
      FrameReader reader(kMagic, widest, limits_of);
      error = error_of([&] { EXPECT_EQ(wait_frame(pair.second.get(), reader, soon()).stream, stream); });
    }
    EXPECT_EQ(open_fds(), before);
    return error;
  };
  EXPECT_EQ(read(1, 100, true), "(no error)");
  EXPECT_EQ(read(2, 10, false), "(no error)");
  EXPECT_THAT(read(2, 11, false), HasSubstr("announces 11 bytes, at most 10"));
  EXPECT_THAT(read(2, 10, true), HasSubstr("announces 1 descriptors, at most 0"));
}

TEST(FramingTest, EveryMalformedHeaderIsAnErrorThatSaysWhy) {
  struct Case {
    std::vector<std::byte> bytes;
    const char* complaint;
  };
  const std::vector<Case> cases = {
      {header(0x31323334, 0), "speaks something else"}, {header(kMagic, 101), "announces 101 bytes, at most 100"},
      {header(kMagic, 0xffffffff), "at most 100"},      {header(kMagic, 0, 1), "descriptors"},
      {header(kMagic, 0, 0, 1), "has a check"},         {header(kMagic, 0, 0, 0, 7), "on stream 7"},
  };
  for (const Case& bad : cases) {
    const SocketPair pair = socket_pair();
    send_some(pair.first.get(), bad.bytes);
    FrameReader reader(kMagic, {.payload_bytes = 100});
    EXPECT_THAT(error_of([&] { wait_frame(pair.second.get(), reader, soon()); }), HasSubstr(bad.complaint));
  }
}

TEST(FramingTest, ACheckIsHandedOverWhereItIsTaken) {
  const SocketPair pair = socket_pair();
  FrameWriter writer(kMagic, 1, 1 << 20);
  writer.push(10, payload_of(5), {}, 0, 0x1234);
  EXPECT_TRUE(writer.flush(pair.first.get()));
  FrameReader reader(kMagic, {});
  reader.take_checks();
  EXPECT_EQ(wait_frame(pair.second.get(), reader, soon()).check, 0x1234);
}

TEST(FramingTest, APeerThatSaysLittleTakesLittleMemory) {
  const SocketPair pair = socket_pair();
  FrameReader reader(kMagic, {.payload_bytes = 4096});
  const std::vector<std::byte> half = header(kMagic, 4096);
  send_some(pair.first.get(), std::span(half).first(10));
  EXPECT_TRUE(reader.fill(pair.second.get()));
  EXPECT_FALSE(reader.next().has_value());
  EXPECT_LE(reader.memory(), 4U << 10);
  send_some(pair.first.get(), std::vector<std::byte>(1 << 20));  // what was not announced is not kept either
  EXPECT_ANY_THROW({
    while (reader.fill(pair.second.get())) (void)reader.next();
  });
}

TEST(FramingTest, AnEndInsideAFrameIsAnError) {
  const std::vector<std::byte> whole = header(kMagic, 10);
  for (size_t length = 1; length <= whole.size(); ++length) {
    SocketPair pair = socket_pair();
    send_some(pair.first.get(), std::span(whole).first(length));
    pair.first.reset();
    FrameReader reader(kMagic, {});
    EXPECT_THAT(error_of([&] { wait_frame(pair.second.get(), reader, soon()); }), HasSubstr("ended inside")) << length;
  }
}

TEST(FramingTest, UnannouncedDescriptorsAreRefusedAndClosed) {
  const SocketPair pair = socket_pair();
  const size_t before = open_fds();
  {
    const std::vector<std::byte> plain = header(kMagic, 0);
    const std::array<int, 1> fds{pair.first.get()};
    ASSERT_EQ(send_some(pair.first.get(), plain, fds), plain.size());
    FrameReader reader(kMagic, {.payload_bytes = 100, .fds = 4});
    EXPECT_THAT(error_of([&] { wait_frame(pair.second.get(), reader, soon()); }), HasSubstr("no frame announced"));
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(FramingTest, DescriptorsThatNobodyAnnouncedAreNotCollectedWhileAFrameIsAwaited) {
  const SocketPair pair = socket_pair();
  const size_t before = open_fds();
  {
    std::vector<int> fds(kMaxFdsPerMessage, pair.first.get());
    std::vector<std::byte> frame = header(kMagic, 100);
    frame.resize(frame.size() + 100);
    FrameReader reader(kMagic, {.payload_bytes = 100, .fds = kMaxFdsPerMessage});
    const std::string error = error_of([&] {
      for (const std::byte& byte : frame) {  // a byte a message, each with as many as it takes
        ASSERT_EQ(send_some(pair.first.get(), std::span(&byte, 1), fds), 1U);
        reader.fill(pair.second.get());
        EXPECT_LE(open_fds(), before + 2 * kMaxFdsPerMessage);
        if (reader.next()) break;
      }
    });
    EXPECT_THAT(error, HasSubstr("descriptors came with part of a frame's header"));
  }
  EXPECT_EQ(open_fds(), before);
  {
    const std::array<int, 1> fds{pair.first.get()};
    FrameReader reader(kMagic, {.payload_bytes = 100, .fds = 4});
    const SocketPair other = socket_pair();
    ASSERT_EQ(send_some(other.first.get(), header(kMagic, 100), fds), kFrameHeaderBytes);
    EXPECT_THAT(error_of([&] { wait_frame(other.second.get(), reader, soon()); }),
                HasSubstr("1 descriptors came that no frame announced"));
  }
}

TEST(FramingTest, RandomBytesNeverYieldMoreThanTheyHold) {
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    SocketPair pair = socket_pair();
    std::vector<std::byte> stream = header(kMagic, random() % 64);
    stream.resize(stream.size() + random() % 64);
    for (int flips = static_cast<int>(random() % 4); flips > 0; --flips)
      stream[random() % stream.size()] = static_cast<std::byte>(random());
    send_some(pair.first.get(), stream);
    pair.first.reset();
    FrameReader reader(kMagic, {.payload_bytes = 64});
    size_t received = 0;
    error_of([&] {
      while (true) received += kFrameHeaderBytes + wait_frame(pair.second.get(), reader, soon()).payload.size();
    });
    EXPECT_LE(received, stream.size());
  }
}

}  // namespace
}  // namespace tessera
