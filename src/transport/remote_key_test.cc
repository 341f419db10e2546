#include "transport/remote_key.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/fields_testing.h"
#include "base/socket.h"

namespace tessera {
namespace {

// A key with so many descriptors.
RemoteKey key_with(size_t fds) {
  RemoteKey key{.transport = "shm", .device = DeviceKind::kHost, .bytes = {std::byte{1}, std::byte{2}}, .fds = {}};
  for (size_t i = 0; i < fds; ++i) key.fds.emplace_back(::dup(STDIN_FILENO));
  return key;
}

TEST(RemoteKey, ComesBackAsItWasWrittenButForItsDescriptors) {
  expect_exact(key_with(2));
  expect_fields_hold<RemoteKey>();
  const auto read = read_message<RemoteKey>(message_bytes(key_with(2)), "key");
  EXPECT_EQ(read.transport, "shm");
  EXPECT_EQ(read.bytes, key_with(0).bytes);
  ASSERT_EQ(read.fds.size(), 2U);
  EXPECT_FALSE(read.fds[0]);
}

TEST(RemoteRange, ComesBackAndDoesNotWrapAround) {
  expect_fields_hold<RemoteRange>();
  const auto round_trip = [](const RemoteRange& range) {
    return read_message<RemoteRange>(message_bytes(range), "range");
  };
  const RemoteRange range{.key = 7, .offset = 4096, .bytes = 123};
  EXPECT_EQ(round_trip(range), range);
  EXPECT_THROW(round_trip({.offset = UINT64_MAX - 10, .bytes = 20}), Error);
  EXPECT_THROW(round_trip({.offset = 0, .bytes = UINT64_MAX}), Error);
}

TEST(RemoteKey, DescriptorsTravelBesideTheKeysInTheirOrder) {
  std::vector<RemoteKey> keys;
  keys.push_back(key_with(2));
  keys.push_back(key_with(0));
  keys.push_back(key_with(1));
  const int last = keys[2].fds[0].get();
  std::vector<UniqueFd> fds = detach_fds(keys);
  ASSERT_EQ(fds.size(), 3U);
  ASSERT_EQ(keys[0].fds.size(), 2U);  // as they still say
  EXPECT_FALSE(keys[0].fds[0]);
  attach_fds(keys, std::move(fds));
  EXPECT_TRUE(keys[0].fds[0] && keys[0].fds[1]);
  EXPECT_EQ(keys[2].fds[0].get(), last);

  fds = detach_fds(keys);
  fds.pop_back();
  EXPECT_THROW(attach_fds(keys, std::move(fds)), Error);
  fds.clear();
  fds.resize(4);
  EXPECT_THROW(attach_fds(keys, std::move(fds)), Error);
}

TEST(RemoteKey, AMessageCarriesSoManyDescriptorsAndNoMore) {
  EXPECT_EQ(split_by_fds({}).size(), 1U);
  std::vector<RemoteKey> keys;
  for (size_t i = 0; i < kMaxFdsPerMessage + 1; ++i) {
    keys.push_back(key_with(0));
    keys.back().bytes = {static_cast<std::byte>(i)};
    keys.back().fds.resize(1);
  }
  keys.push_back(key_with(0));
  const auto parts = split_by_fds(std::move(keys));
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].size(), kMaxFdsPerMessage);
  ASSERT_EQ(parts[1].size(), 2U);
  EXPECT_EQ(parts[1][0].bytes.front(), static_cast<std::byte>(kMaxFdsPerMessage));
}

}  // namespace
}  // namespace tessera
