#include "transport/shm/connection.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/testing.h"
#include "transport/transport.h"

namespace tessera {
namespace {

using transport_testing::Child;
using transport_testing::forbid_process_vm_readv;
using transport_testing::Shared;
using transport_testing::Signal;

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
  MemoryDesc memory() const { return {.offset = (*address)[0], .bytes = sizeof(kText)}; }

 private:
  // The child's own Incarnation::self(), as far as a peer needs it.
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

// `pieces` of `memory`, by offsets in it.
Status get(const Connection& peer, const MemoryDesc& memory, std::span<const Piece> pieces,
           std::span<const std::span<std::byte>> out) {
  const RemoteRegion region = peer.region(memory);
  std::vector<Piece> placed(pieces.begin(), pieces.end());
  for (Piece& piece : placed) piece.offset += region.offset;
  return peer.get(region.space, placed, out);
}

TEST(ShmConnection, GathersPiecesOfAnotherProcess) {
  const Holder holder;
  const ShmConnection peer(holder.incarnation, "trainer/1");
  EXPECT_EQ(peer.caps(), (Caps{Access::kMap, Access::kGet, Access::kStream}));
  EXPECT_EQ(peer.region(holder.memory()).caps, (Caps{Access::kGet, Access::kStream}));
  std::array<char, 8> a{};
  std::array<char, 3> b{};
  const std::array<Piece, 3> pieces{Piece{4, 5}, Piece{16, 3}, Piece{10, 3}};  // "quick", "fox", "bro"
  const std::array<std::span<std::byte>, 2> out{std::as_writable_bytes(std::span(a)),
                                                std::as_writable_bytes(std::span(b))};
  EXPECT_EQ(get(peer, holder.memory(), pieces, out), Status());
  EXPECT_EQ(std::string(a.data(), a.size()), "quickfox");
  EXPECT_EQ(std::string(b.data(), b.size()), "bro");
}

TEST(ShmConnection, ManyPiecesTakeManyCalls) {
  std::vector<uint32_t> from(20'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint32_t>(i);
  const ShmConnection peer(Incarnation::self(), "trainer/0");
  const MemoryDesc memory = describe_memory(from.data(), from.size() * 4);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < from.size(); i += 2) pieces.push_back({i * 4, 4});
  std::vector<uint32_t> to(pieces.size());
  const std::span<std::byte> out = std::as_writable_bytes(std::span(to));
  EXPECT_EQ(get(peer, memory, pieces, std::span(&out, 1)), Status());
  for (size_t i = 0; i < to.size(); ++i) ASSERT_EQ(to[i], 2 * i);
}

TEST(ShmConnection, SaysThatThePeerDied) {
  Holder holder;
  const ShmConnection peer(holder.incarnation, "trainer/1");
  const MemoryDesc memory = holder.memory();
  holder.child.kill();
  holder.child.wait();
  std::array<std::byte, 4> bytes{};
  const std::span<std::byte> out(bytes);
  const Piece piece{0, 4};
  const Status status = get(peer, memory, std::span(&piece, 1), std::span(&out, 1));
  EXPECT_EQ(status.code(), ErrorCode::kPeerLost);
  EXPECT_NE(status.message().find("trainer/1"), std::string::npos) << status.message();
}

TEST(ShmConnection, SaysThatTheMemoryIsGone) {
  const Holder holder;
  const ShmConnection peer(holder.incarnation, "trainer/1");
  std::array<std::byte, 4> bytes{};
  const std::span<std::byte> out(bytes);
  const Piece piece{0, 4};
  EXPECT_EQ(get(peer, {.offset = 4096, .bytes = 4}, std::span(&piece, 1), std::span(&out, 1)).code(),
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

TEST(ShmConnection, ChecksEveryRangeAgainstTheAnnouncedArenas) {
  SharedArena arena(5, SharedArena::kHugePage);
  ShmConnection peer(Incarnation::self(), "trainer/0");
  peer.add_arena({5, arena.bytes()}, UniqueFd(::dup(arena.fd_for_peer())));
  const auto shared = [](uint32_t id, uint64_t offset, uint64_t bytes) {
    return MemoryDesc{.kind = MemoryDesc::Kind::kShared, .arena = id, .offset = offset, .bytes = bytes};
  };
  EXPECT_NE(peer.region(shared(5, 0, arena.bytes())).mapped, nullptr);
  EXPECT_THROW(peer.region(shared(5, 1, arena.bytes())), Error);
  EXPECT_THROW(peer.region(shared(5, arena.bytes() + 1, 0)), Error);
  EXPECT_THROW(peer.region(shared(6, 0, 1)), Error);
  EXPECT_THROW(peer.add_arena({5, arena.bytes()}, UniqueFd(::dup(arena.fd_for_peer()))), Error);
}

TEST(ShmConnection, ReadsAnArenaThatCouldShrinkWithoutMappingIt) {
  UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  ASSERT_EQ(::pwrite(fd.get(), kText, sizeof(kText), 4096), static_cast<ssize_t>(sizeof(kText)));
  ShmConnection peer(Incarnation::self(), "trainer/0");
  peer.add_arena({1, 8192}, UniqueFd(::dup(fd.get())));
  const MemoryDesc memory{.kind = MemoryDesc::Kind::kShared, .arena = 1, .offset = 4096, .bytes = 4096};
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
