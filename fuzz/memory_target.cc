#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "fuzz/targets.h"
#include "transport/arena_table.h"
#include "transport/shm/bounce_ring.h"

namespace tessera::fuzz {
namespace {

// Places that a peer describes, in an arena of which it says more than is true.
void read_places(ByteReader& in) {
  const auto file_bytes = in.get<uint16_t>();
  const bool sealed = in.get<uint8_t>() % 2 == 0;
  UniqueFd fd(::memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TESSERA_CHECK(::ftruncate(fd.get(), file_bytes) == 0);
  if (sealed) TESSERA_CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  ArenaTable table;
  const ArenaDesc arena = ArenaDesc::read(in);
  table.add(arena, std::move(fd), "a/0");
  TESSERA_CHECK_LE(arena.bytes, uint64_t{file_bytes});
  std::vector<std::byte> copy;
  while (in.left() > 0) {
    const MemoryDesc place = MemoryDesc::read(in);
    const RemoteRegion region = table.region(place, "a/0");
    if (!region.caps.has(Access::kGet)) continue;
    TESSERA_CHECK_LE(place.bytes, arena.bytes);
    copy.resize(place.bytes);
    const Piece piece{region.offset, place.bytes};
    const std::span<std::byte> out(copy);
    if (!copy.empty()) TESSERA_CHECK(table.get(region.space, std::span(&piece, 1), std::span(&out, 1)).ok());
  }
}

// The peer writes what it likes, where it likes, between any two steps of ours.
void disturb_ring(ByteReader& in) {
  static const std::unique_ptr<BounceRing> ring = BounceRing::create();
  constexpr size_t kHeaderBytes = 4096;
  static auto* const header =
      static_cast<std::byte*>(::mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd(), 0));
  TESSERA_CHECK(header != MAP_FAILED);
  std::fill_n(header, kHeaderBytes, std::byte{0});
  const bool produces = in.get<uint8_t>() % 2 == 0;
  const uint32_t epoch = std::max<uint32_t>(in.get<uint8_t>(), 1);
  if (produces) ring->begin_produce(epoch);
  if (!produces) ring->begin_consume(epoch);
  const Deadline now = Deadline::after(Duration::zero());
  while (in.left() > 0) {
    const size_t offset = in.get<uint16_t>() % (kHeaderBytes - sizeof(uint64_t));
    const auto value = in.get<uint64_t>();
    std::memcpy(header + offset, &value, sizeof(value));
    if (produces) {
      const std::span<std::byte> room = ring->reserve(now);
      TESSERA_CHECK(room.empty() || room.size() == BounceRing::kSlotBytes);
      if (room.empty()) continue;
      room.front() = room.back() = std::byte{1};
      ring->publish(room.size());
    } else {
      const std::span<const std::byte> frame = ring->acquire(now);
      TESSERA_CHECK_LE(frame.size(), BounceRing::kSlotBytes);
      if (frame.empty()) continue;
      const std::vector<std::byte> readable(frame.begin(), frame.end());
      ring->release();
    }
  }
}

}  // namespace

bool memory(Input input) {
  return accepts([&] {
    ByteReader in(input, "input");
    switch (in.get<char>()) {
      case 'a':
        return read_places(in);
      case 'r':
        return disturb_ring(in);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind");
    }
  });
}

}  // namespace tessera::fuzz
