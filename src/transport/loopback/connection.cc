#include "transport/loopback/connection.h"

#include <cstring>

#include "transport/scatter.h"

namespace tessera {

RemoteRegion LoopbackConnection::region(const MemoryDesc& memory) const {
  if (memory.kind != MemoryDesc::Kind::kPrivate) return arenas_.region(memory, name_);
  const auto* const data = reinterpret_cast<const std::byte*>(memory.offset);
  return {.caps = caps(), .mapped = data, .space = ArenaTable::kNoArena, .offset = memory.offset};
}

Status LoopbackConnection::get(uint64_t space, std::span<const Piece> pieces,
                               std::span<const std::span<std::byte>> out) const {
  if (space != ArenaTable::kNoArena) return arenas_.get(space, pieces, out);
  return scatter(pieces, out, [](uint64_t offset, std::span<std::byte> part) {
    std::memcpy(part.data(), reinterpret_cast<const std::byte*>(offset), part.size());
    return Status();
  });
}

}  // namespace tessera
