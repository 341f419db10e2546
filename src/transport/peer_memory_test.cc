// One end exports memory and the other one accesses it, by whichever transport serves each region.
#include "transport/peer_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "memory/host/shared_arena.h"
#include "tessera/memory.h"
#include "transport/exporter.h"

namespace tessera {
namespace {

const TransportRegistry& builtin() {
  return TransportRegistry::builtin();
}
const TransportRegistry& shm_alone() {
  static const TransportRegistry registry({builtin().find("shm")});
  return registry;
}
Endpoint this_process() {
  return {.process = Incarnation::self(), .name = "trainer/0"};
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "it was taken";
}

std::string text_at(const Connection& peer, const RemoteRange& range) {
  const RemoteRegion region = peer.region(range);
  std::string text(range.bytes, '?');
  const Piece piece{region.offset, range.bytes};
  const std::span<std::byte> out = std::as_writable_bytes(std::span(text));
  EXPECT_EQ(peer.get(region.key, std::span(&piece, 1), std::span(&out, 1)), Status());
  return text;
}

TEST(Exporter, GivesAKeyForEachRegionOnce) {
  Exporter exporter(shm_alone(), this_process(), this_process());
  const SharedBuffer shared = SharedHeap::process().allocate(4096);
  const std::string own = "in private memory";
  const auto* const data = reinterpret_cast<const std::byte*>(own.data());
  const auto first = exporter.add({.data = shared.data(), .bytes = 100});
  const auto second = exporter.add({.data = data, .bytes = own.size()});
  const auto third = exporter.add({.data = shared.data() + 100, .bytes = 100});
  const auto packed = exporter.add({.data = data, .bytes = 5, .packed = true});
  EXPECT_EQ(first.range.key, 0U);
  EXPECT_EQ(second.range, (RemoteRange{1, reinterpret_cast<uintptr_t>(data), own.size()}));
  EXPECT_EQ(third.range, (RemoteRange{0, first.range.offset + 100, 100}));
  EXPECT_EQ(packed.range, (RemoteRange{2, 0, 5}));
  EXPECT_EQ(first.caps, (Caps{Access::kMap, Access::kGet}));
  EXPECT_EQ(second.caps, (Caps{Access::kGet, Access::kStream}));
  EXPECT_EQ(packed.caps, Caps{Access::kStream});
  EXPECT_EQ(exporter.take_keys().size(), 3U);
  exporter.add({.data = shared.data(), .bytes = 1});
  EXPECT_TRUE(exporter.take_keys().empty());
}

TEST(PeerMemory, ReachesWhatTheExporterTellsOf) {
  Exporter exporter(shm_alone(), this_process(), this_process());
  const SharedBuffer shared = SharedHeap::process().allocate(4096);
  const std::string own = "private";
  std::memcpy(shared.data() + 64, "shared", 6);
  const RemoteRange ranges[] = {
      exporter.add({.data = shared.data() + 64, .bytes = 6}).range,
      exporter.add({.data = reinterpret_cast<const std::byte*>(own.data()), .bytes = own.size()}).range};
  PeerMemory peer(builtin(), this_process(), this_process());
  EXPECT_EQ(peer.caps(), Caps());
  std::vector<RemoteKey> keys = exporter.take_keys();
  for (uint32_t i = 0; i < keys.size(); ++i) peer.add_key(i, std::move(keys[i]));
  EXPECT_EQ(peer.caps(), (Caps{Access::kMap, Access::kGet, Access::kStream}));
  EXPECT_EQ(text_at(peer, ranges[0]), "shared");
  EXPECT_EQ(text_at(peer, ranges[1]), "private");
  EXPECT_EQ(std::memcmp(peer.region(ranges[0]).mapped, "shared", 6), 0);
}

TEST(PeerMemory, EachKeyIsReadByTheTransportThatItNames) {
  const std::string own = "private";
  const auto* const data = reinterpret_cast<const std::byte*>(own.data());
  PeerMemory peer(builtin(), this_process(), this_process());
  peer.add_key(4, builtin().find("shm")->export_region({}));
  peer.add_key(2, builtin().find("loopback")->export_region({}));
  const RemoteRange by_shm{.key = 4, .offset = reinterpret_cast<uintptr_t>(data), .bytes = own.size()};
  RemoteRange by_loopback = by_shm;
  by_loopback.key = 2;
  EXPECT_EQ(peer.region(by_shm).mapped, nullptr);
  EXPECT_EQ(peer.region(by_loopback).mapped, data);
  EXPECT_EQ(text_at(peer, by_shm), own);
  EXPECT_EQ(text_at(peer, by_loopback), own);
}

TEST(PeerMemory, RefusesKeysThatLeadNowhere) {
  const auto key_of = [](std::string transport) {
    return RemoteKey{.transport = std::move(transport), .device = DeviceKind::kHost, .bytes = {}, .fds = {}};
  };
  PeerMemory peer(builtin(), this_process(), this_process());
  EXPECT_NE(refusal([&] { peer.add_key(0, key_of("pigeons")); }).find("\"pigeons\", which is unknown here"),
            std::string::npos);
  EXPECT_NE(refusal([&] { peer.add_key(0, key_of("ucx")); }).find("is of ucx, which does not go from"),
            std::string::npos);
  Endpoint other = this_process();
  ++other.process.start_time;
  PeerMemory neighbour(builtin(), other, this_process());
  EXPECT_NE(refusal([&] { neighbour.add_key(0, key_of("loopback")); }).find("does not go from"), std::string::npos);
  other.process.boot_id = "another machine";
  PeerMemory far(builtin(), other, this_process());
  EXPECT_NE(refusal([&] { far.add_key(0, builtin().find("shm")->export_region({})); }).find("does not go from"),
            std::string::npos);
  RemoteKey on_gpu = builtin().find("shm")->export_region({});
  on_gpu.device = DeviceKind::kCuda;
  EXPECT_NE(refusal([&] { peer.add_key(0, std::move(on_gpu)); }).find("(cuda memory)"), std::string::npos);
  RemoteKey odd = key_of("loopback");
  odd.bytes.resize(1);
  EXPECT_NE(refusal([&] { peer.add_key(0, std::move(odd)); }).find("with 1 bytes"), std::string::npos);

  EXPECT_NE(refusal([&] { peer.region({.key = 0, .offset = 0, .bytes = 1}); }).find("key 0 was never given"),
            std::string::npos);  // none of them was taken
  peer.add_key(0, key_of("loopback"));
  EXPECT_NE(refusal([&] { peer.add_key(0, key_of("loopback")); }).find("key 0 came twice"), std::string::npos);
}

TEST(TransportRegistry, OpensAStreamByTheTransportThatMadeIt) {
  Streams::Ends ends = builtin().make_stream(this_process(), this_process());
  EXPECT_EQ(ends.producer.transport, ends.consumer.transport);
  EXPECT_EQ(ends.producer.duplicate().transport, ends.producer.transport);
  const auto open = [](StreamEnd end, const Endpoint& src) {
    return builtin().open_stream(std::move(end), src, this_process(), "trainer/0");
  };
  EXPECT_NE(open(ends.producer.duplicate(), this_process()), nullptr);
  EXPECT_NE(open(std::move(ends.consumer), this_process()), nullptr);
  Endpoint far = this_process();
  far.process.boot_id = "another machine";
  EXPECT_NE(refusal([&] { open(ends.producer.duplicate(), far); }).find("has none from"), std::string::npos);
  ends.producer.transport = "loopback";
  EXPECT_NE(refusal([&] { open(std::move(ends.producer), this_process()); }).find("\"loopback\" has none from"),
            std::string::npos);
}

TEST(PeerMemory, OnesOwnMemoryIsReachedByAddress) {
  const std::string own = "private";
  const auto memory = connect_to_self(this_process());
  EXPECT_EQ(text_at(*memory, own_range(own.data(), own.size())), own);
  EXPECT_EQ(own_data(own_range(own.data(), own.size())), reinterpret_cast<const std::byte*>(own.data()));
  EXPECT_THROW(memory->region({.key = kOwnPacked, .offset = 0, .bytes = 1}), Error);
  EXPECT_EQ(connect_to_self(this_process(), true)->region({.key = kOwnPacked, .offset = 0, .bytes = 1}).caps,
            Caps{Access::kStream});
}

}  // namespace
}  // namespace tessera
