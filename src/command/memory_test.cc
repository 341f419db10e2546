#include "command/memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>

#include "base/socket.h"
#include "base/testing.h"
#include "command/probe.h"

namespace tessera {
namespace {

using testing::HasSubstr;

std::vector<std::byte> contents(const CommandMemory& memory) {
  std::vector<std::byte> bytes(static_cast<size_t>(::lseek(memory.fd(), 0, SEEK_END)));
  EXPECT_EQ(::pread(memory.fd(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return bytes;
}

TEST(CommandMemory, TheOtherSideOpensWhatOneSideCreated) {
  const size_t before = open_fds();
  {
    const auto client = CommandMemory::create(42, {.commands = 3, .replies = 5});
    const auto agent = CommandMemory::open(duplicate_fd(client->fd()), "trainer/0");
    EXPECT_EQ(agent->incarnation(), 42u);
    EXPECT_EQ(agent->commands().capacity(), 3u);
    EXPECT_EQ(agent->replies().capacity(), 5u);
    EXPECT_EQ(open_fds(), before + 1);  // the creator's

    CommandProducer commands(client->commands(), {});
    CommandProducer replies(agent->replies(), {});
    for (uint64_t id = 1; id <= 3; ++id) EXPECT_EQ(commands.try_push({.id = id}, {}), RingState::kReady);
    for (uint64_t id = 1; id <= 5; ++id) EXPECT_EQ(replies.try_push({.id = 10 * id}, {}), RingState::kReady);
    CommandConsumer taken(agent->commands(), {});
    CommandConsumer answered(client->replies(), {});
    Record record;
    for (uint64_t id = 1; id <= 3; ++id) {
      ASSERT_EQ(taken.try_pop(record), RingState::kReady);
      EXPECT_EQ(record.head.id, id);
    }
    for (uint64_t id = 1; id <= 5; ++id) {
      ASSERT_EQ(answered.try_pop(record), RingState::kReady);
      EXPECT_EQ(record.head.id, 10 * id);
    }
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(CommandMemory, WhatCouldShrinkIsNotOpened) {
  UniqueFd fd(::memfd_create("queue", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 1 << 20), 0);
  EXPECT_THAT(error_of([&] { CommandMemory::open(std::move(fd), "trainer/0"); }),
              HasSubstr("trainer/0: the descriptor is not sealed"));
  EXPECT_THAT(error_of([&] { CommandMemory::open(UniqueFd(), "trainer/0"); }), HasSubstr("not sealed"));
}

TEST(CommandMemory, AHeaderThatDoesNotFitIsRefused) {
  const auto memory = CommandMemory::create(42, {.commands = 2, .replies = 2});
  const std::vector<std::byte> good = contents(*memory);
  EXPECT_EQ(CommandMemory::open(sealed_file(good), "trainer/0")->incarnation(), 42u);

  struct Case {
    size_t at;
    uint32_t value;
    const char* error;
  };
  const Case cases[] = {
      {0, 0, "magic 0x00000000 instead of 0x51435354"},
      {4, 2u | 1024u << 16, "mismatch: command queue of trainer/0: version 2"},
      {4, 1u | 512u << 16, "2 and 2 slots of 512 bytes do not make 8192 bytes"},
      {16, 0, "0 and 2 slots"},
      {16, 0xFFFFFFFF, "4294967295 and 2 slots"},
      {16, 3, "3 and 2 slots"},
      {20, 0, "2 and 0 slots"},
      {20, 4097, "2 and 4097 slots"},
  };
  for (const Case& c : cases) {
    std::vector<std::byte> bad = good;
    std::memcpy(bad.data() + c.at, &c.value, sizeof c.value);
    EXPECT_THAT(error_of([&] { CommandMemory::open(sealed_file(bad), "trainer/0"); }), HasSubstr(c.error));
  }
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{4096}, good.size() - 1, good.size() + 1}) {
    std::vector<std::byte> bad = good;
    bad.resize(bytes);
    EXPECT_THAT(error_of([&] { CommandMemory::open(sealed_file(bad), "trainer/0"); }), HasSubstr("trainer/0")) << bytes;
  }
}

TEST(CommandMemory, ArbitraryBytesAreReadOrRefused) {
  const auto memory = CommandMemory::create(42, {.commands = 3, .replies = 2});
  CommandProducer commands(memory->commands(), {});
  CommandProducer replies(memory->replies(), {});
  const std::byte payload[100] = {};
  for (uint64_t id = 1; id <= 3; ++id) commands.try_push({.incarnation = 42, .id = id, .type = 1}, payload);
  for (uint64_t id = 1; id <= 2; ++id) replies.try_push({.incarnation = 42, .id = id, .type = 1}, payload);
  const std::vector<std::byte> good = contents(*memory);
  EXPECT_EQ(probe_command_memory(good), 5u);

  const size_t fds = open_fds();
  std::mt19937 random(5);
  size_t read = 0, refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> bytes = good;
    // Offsets with meaning, more often than others.
    const size_t places[] = {0, 256, 320, 384, 448, 512, 576, 640, 704, 4096, 5120, 6144, 7168, 8192};
    for (uint32_t flips = 1 + random() % 4; flips > 0; --flips)
      bytes[places[random() % std::size(places)] + random() % 32] = static_cast<std::byte>(random());
    try {
      EXPECT_LE(probe_command_memory(bytes), 5u);
      ++read;
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::kInternal) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(read, 200u);
  EXPECT_GT(refused, 200u);
  EXPECT_EQ(open_fds(), fds);
}

}  // namespace
}  // namespace tessera
