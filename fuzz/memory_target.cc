#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/message.h"
#include "fuzz/targets.h"
#include "transport/shm/bounce_ring.h"
#include "transport/shm/key_table.h"

namespace tessera::fuzz {
namespace {

// Two keys from a peer, one of them possibly for a file that is shorter than it claims, and ranges.
void read_ranges(ByteReader& in) {
  const auto file_bytes = in.get<uint16_t>();
  const bool sealed = in.get<uint8_t>() % 2 == 0;
  KeyTable table;
  for (uint32_t i = 0; i < 2; ++i) {
    RemoteKey key;
    read_fields(in, key);
    if (key.fds.size() == 1) {
      key.fds.front() = UniqueFd(::memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      TESSERA_CHECK(::ftruncate(key.fds.front().get(), file_bytes) == 0);
      if (sealed) TESSERA_CHECK(::fcntl(key.fds.front().get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    }
    table.add(i, std::move(key), "a/0");
  }
  std::vector<std::byte> copy;
  while (in.left() > 0) {
    RemoteRange range;
    read_fields(in, range);
    const RemoteRegion region = table.region(range, "a/0");
    const MappedArena* const arena = table.arena(range.key);
    if (arena == nullptr) continue;
    TESSERA_CHECK(region.caps.has(Access::kGet));
    TESSERA_CHECK_LE(arena->bytes(), uint64_t{file_bytes});
    TESSERA_CHECK_LE(range.bytes, arena->bytes());
    copy.resize(range.bytes);
    if (!copy.empty()) TESSERA_CHECK(arena->read(region.offset, copy).ok());
  }
}

// The peer writes anything anywhere between any two of our steps.
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
        return read_ranges(in);
      case 'r':
        return disturb_ring(in);
      default:
        fail(ErrorCode::kInvalidArgument, "no such kind"_message);
    }
  });
}

}  // namespace tessera::fuzz
