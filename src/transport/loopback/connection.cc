#include "transport/loopback/connection.h"

#include <cstring>

#include "base/fail.h"
#include "transport/scatter.h"

namespace tessera {

const std::byte* LoopbackConnection::mapped(const MemoryDesc& memory) const {
  if (memory.kind == MemoryDesc::Kind::kRingOnly) return nullptr;
  if (memory.kind == MemoryDesc::Kind::kPrivate) return reinterpret_cast<const std::byte*>(memory.offset);
  const std::byte* arena = arenas_.find(memory, name_).data();
  return arena == nullptr ? nullptr : arena + memory.offset;
}

Status LoopbackConnection::get(const MemoryDesc& memory, std::span<const Piece> pieces,
                           std::span<const std::span<std::byte>> out) const {
  if (memory.kind == MemoryDesc::Kind::kRingOnly)
    return failed(ErrorCode::kPermissionDenied, "{}: memory that it packs into a ring itself is not to be read", name_);
  if (memory.kind == MemoryDesc::Kind::kShared) {
    const MappedArena& arena = arenas_.find(memory, name_);
    return scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) {
      return arena.read(memory.offset + offset, part);
    });
  }
  const auto* data = reinterpret_cast<const std::byte*>(memory.offset);
  return scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) {
    std::memcpy(part.data(), data + offset, part.size());
    return Status();
  });
}

}  // namespace tessera
