#include "transport/shm/connection.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/socket.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/shm/remote_read.h"
#include "transport/testing.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using transport_testing::Child;
using transport_testing::forbid_process_vm_readv;
using transport_testing::Shared;
using transport_testing::Signal;

// Key 0 is for its private memory.
std::unique_ptr<ShmConnection> reach(const Incarnation& process) {
  auto peer = std::make_unique<ShmConnection>(process, "trainer/1");
  peer->add_key(0, KeyTable::key_of_private_memory());
  return peer;
}

// A process that holds `kText` in private memory until it is killed.
constexpr char kText[] = "the quick brown fox";
struct Holder {
  Shared<std::array<uint64_t, 1>> address;
  Signal ready;
  Child child{[this] {
    auto* text = new char[sizeof(kText)];
    std::memcpy(text, kText, sizeof(kText));
    (*address)[0] = reinterpret_cast<uintptr_t>(text);
    ready.raise();
    ::pause();
    return 0;
  }};
  Incarnation incarnation;

  Holder() {
    ready.wait();
    incarnation = incarnation_of_child();
  }
  RemoteRange memory() const { return {.key = 0, .offset = (*address)[0], .bytes = sizeof(kText)}; }
  std::unique_ptr<ShmConnection> connect() const { return reach(incarnation); }

 private:
  // The child's Incarnation::self(), as far as a peer needs it.
  Incarnation incarnation_of_child() const;
};

uint64_t start_time_of(pid_t pid) {
  std::array<char, 1024> text{};
  std::FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r");
  if (file == nullptr) return 0;
  const size_t got = std::fread(text.data(), 1, text.size() - 1, file);
  std::fclose(file);
  const std::string line(text.data(), got);
  size_t at = line.rfind(')') + 2;
  for (int field = 3; field < 22; ++field) at = line.find(' ', at) + 1;
  return std::strtoull(line.c_str() + at, nullptr, 10);
}

Incarnation Holder::incarnation_of_child() const {
  Incarnation of_child = Incarnation::self();
  of_child.pid = child.pid();
  of_child.start_time = start_time_of(child.pid());
  of_child.nonce = 1;
  return of_child;
}

// Gets `pieces` of `memory`, given by their offsets in it.
Status get(const Connection& peer, const RemoteRange& memory, std::span<const Piece> pieces,
           std::span<const std::span<std::byte>> out) {
  const RemoteRegion region = peer.region(memory);
  std::vector<Piece> placed(pieces.begin(), pieces.end());
  for (Piece& piece : placed) piece.offset += region.offset;
  return peer.get(region.key, placed, out);
}

TEST(ShmConnection, GathersPiecesOfAnotherProcess) {
  const Holder holder;
  const auto peer = holder.connect();
  EXPECT_EQ(peer->caps(), (Caps{Access::kMap, Access::kGet, Access::kStream}));
  EXPECT_EQ(peer->region(holder.memory()).caps, (Caps{Access::kGet, Access::kStream}));
  std::array<char, 8> a{};
  std::array<char, 3> b{};
  const std::array<Piece, 3> pieces{Piece{4, 5}, Piece{16, 3}, Piece{10, 3}};  // "quick", "fox", "bro"
  const std::array<std::span<std::byte>, 2> out{std::as_writable_bytes(std::span(a)),
                                                std::as_writable_bytes(std::span(b))};
  EXPECT_EQ(get(*peer, holder.memory(), pieces, out), Status());
  EXPECT_EQ(std::string(a.data(), a.size()), "quickfox");
  EXPECT_EQ(std::string(b.data(), b.size()), "bro");
}

TEST(ShmConnection, ManyPiecesTakeManyCalls) {
  std::vector<uint32_t> from(20'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i);
  const auto peer = reach(Incarnation::self());
  const RemoteRange memory{.key = 0, .offset = reinterpret_cast<uintptr_t>(from.data()), .bytes = from.size() * 4};
  std::vector<Piece> pieces;
  for (size_t i = 0; i < from.size(); i += 2) pieces.push_back({i * 4, 4});
  std::vector<uint32_t> to(pieces.size());
  const std::span<std::byte> out = std::as_writable_bytes(std::span(to));
  EXPECT_EQ(get(*peer, memory, pieces, std::span(&out, 1)), Status());
  for (size_t i = 0; i < to.size(); ++i) ASSERT_EQ(to[i], 2 * i);
}

TEST(ShmConnection, SaysThatThePeerDied) {
  Holder holder;
  const auto peer = holder.connect();
  const RemoteRange memory = holder.memory();
  holder.child.kill();
  holder.child.wait();
  std::array<std::byte, 4> bytes{};
  const std::span<std::byte> out(bytes);
  const Piece piece{0, 4};
  const Status status = get(*peer, memory, std::span(&piece, 1), std::span(&out, 1));
  EXPECT_EQ(status.code(), ErrorCode::kPeerLost);
  EXPECT_NE(status.message().find("trainer/1"), std::string::npos) << status.message();
}

TEST(ShmConnection, IsNotMadeWithMemoryOfAProcessThatHasEnded) {
  Child child([] { return 0; });
  Incarnation ended = Incarnation::self();
  ended.pid = child.pid();
  child.wait();
  EXPECT_FALSE(ShmConnection(ended, "trainer/1").caps().has(Access::kGet));
  const Status refused = probe_remote_read(ended.pid);
  EXPECT_EQ(refused.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(refused.message(), fmt::format("pid {} cannot be asked for its memory: it has ended", ended.pid));
}

TEST(ShmConnection, SaysThatTheMemoryIsGone) {
  const Holder holder;
  const auto peer = holder.connect();
  std::array<std::byte, 4> bytes{};
  const std::span<std::byte> out(bytes);
  const Piece piece{0, 4};
  EXPECT_EQ(get(*peer, {.key = 0, .offset = 4096, .bytes = 4}, std::span(&piece, 1), std::span(&out, 1)).code(),
            ErrorCode::kPeerLost);
}

TEST(ShmConnection, KnowsThatAFilterForbidsReading) {
  Child child([] {
    const bool before = ShmConnection(Incarnation::self(), "trainer/0").caps().has(Access::kGet);
    if (!forbid_process_vm_readv()) return 3;
    const bool after = ShmConnection(Incarnation::self(), "trainer/0").caps().has(Access::kGet);
    return before && !after ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0);
}

// Expects an error whose message has all of `parts`.
template <typename Body>
void expect_refused(const Body& body, const std::vector<std::string>& parts) {
  try {
    body();
    ADD_FAILURE() << "it was taken";
  } catch (const Error& error) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ShmConnection, ChecksEveryRangeAgainstItsRegion) {
  SharedArena arena(5, SharedArena::kHugePage);
  ShmConnection peer(Incarnation::self(), "trainer/0");
  peer.add_key(3, KeyTable::key_of(arena));
  const uint64_t all = arena.bytes();
  EXPECT_NE(peer.region({.key = 3, .offset = 0, .bytes = all}).mapped, nullptr);
  expect_refused([&] { peer.region({.key = 3, .offset = 1, .bytes = all}); }, {"trainer/0", "leave arena 5"});
  expect_refused([&] { peer.region({.key = 3, .offset = all + 1, .bytes = 0}); }, {"leave arena 5"});
  expect_refused([&] { peer.region({.key = 2, .offset = 0, .bytes = 1}); }, {"key 2 was never given"});
  expect_refused([&] { peer.add_key(3, KeyTable::key_of(arena)); }, {"key 3 came twice"});
}

TEST(ShmConnection, WhatItsOwnerPacksIsReadByNobodyElse) {
  ShmConnection peer(Incarnation::self(), "trainer/0");
  peer.add_key(0, KeyTable::key_of_packed_memory());
  EXPECT_EQ(peer.region({.key = 0, .offset = 0, .bytes = 4096}).caps, Caps{Access::kStream});
}

TEST(ShmConnection, RefusesKeysThatShmDoesNotWrite) {
  SharedArena arena(5, SharedArena::kHugePage);
  ShmConnection peer(Incarnation::self(), "trainer/0");
  const auto refused = [&](const std::function<void(RemoteKey&)>& spoil, const std::string& part) {
    RemoteKey key = KeyTable::key_of(arena);
    spoil(key);
    expect_refused([&] { peer.add_key(0, std::move(key)); }, {part});
  };
  refused([](RemoteKey& key) { key.bytes.clear(); }, "truncated");
  refused([](RemoteKey& key) { key.bytes.pop_back(); }, "truncated");
  refused([](RemoteKey& key) { key.bytes.push_back({}); }, "too many");
  refused([](RemoteKey& key) { key.bytes.front() = std::byte{3}; }, "unknown code");
  refused([](RemoteKey& key) { std::fill(key.bytes.begin() + 5, key.bytes.end(), std::byte{0}); }, "a size of 0 bytes");
  refused([](RemoteKey& key) { key.bytes[5 + 4] = std::byte{1}; }, "bytes announced, the file has");
  refused([](RemoteKey& key) { key.fds.clear(); }, "with 0 descriptors");
  refused([](RemoteKey& key) { key.fds.resize(2); }, "with 2 descriptors");
  refused([](RemoteKey& key) { key.fds.front() = UniqueFd(::socket(AF_UNIX, SOCK_STREAM, 0)); }, "not a file");
  RemoteKey packed = KeyTable::key_of_packed_memory();
  packed.fds.resize(1);
  expect_refused([&] { peer.add_key(0, std::move(packed)); }, {"with 1 descriptors"});
  peer.add_key(0, KeyTable::key_of(arena));  // none of these has taken its place
}

TEST(ShmConnection, ReadsAnArenaThatCouldShrinkWithoutMappingIt) {
  UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  ASSERT_EQ(::pwrite(fd.get(), kText, sizeof(kText), 4096), static_cast<ssize_t>(sizeof(kText)));
  ShmConnection peer(Incarnation::self(), "trainer/0");
  ByteWriter bytes;
  bytes.put(uint8_t{1});  // an arena
  bytes.put(uint32_t{1});
  bytes.put(uint64_t{8192});
  RemoteKey key{.transport = "shm", .device = DeviceKind::kHost, .bytes = bytes.take(), .fds = {}};
  key.fds.push_back(duplicate_fd(fd.get()));
  peer.add_key(1, std::move(key));
  const RemoteRange memory{.key = 1, .offset = 4096, .bytes = 4096};
  EXPECT_EQ(peer.region(memory).caps, Caps{Access::kGet});
  std::array<char, 3> text{};
  const std::span<std::byte> out = std::as_writable_bytes(std::span(text));
  const Piece piece{16, 3};
  EXPECT_EQ(get(peer, memory, std::span(&piece, 1), std::span(&out, 1)), Status());
  EXPECT_EQ(std::string(text.data(), 3), "fox");
  ASSERT_EQ(::ftruncate(fd.get(), 0), 0);
  EXPECT_EQ(get(peer, memory, std::span(&piece, 1), std::span(&out, 1)).code(), ErrorCode::kPeerLost);
}

TEST(TransportRegistry, ChoosesLoopbackForOneselfAndShmForNeighbours) {
  const TransportRegistry& registry = TransportRegistry::builtin();
  const Endpoint self{.process = Incarnation::self(), .name = "inference/0"};
  const Holder holder;
  const Endpoint neighbour{.process = holder.incarnation, .name = "trainer/1"};
  EXPECT_EQ(registry.choose(self, self).name(), "loopback");
  EXPECT_EQ(registry.choose(neighbour, self).name(), "shm");
  Endpoint far = neighbour;
  far.process.boot_id = "another machine";
  try {
    registry.choose(far, self);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnimplemented);
    EXPECT_NE(std::string(error.what()).find("ucx"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera
