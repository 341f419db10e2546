#include "transport/arena_table.h"

#include <utility>

#include "base/fail.h"
#include "transport/scatter.h"

namespace tessera {

void ArenaTable::add(const ArenaDesc& arena, UniqueFd fd, const std::string& owner) {
  const auto [entry, added] = arenas_.try_emplace(arena.id, std::move(fd), arena.bytes, owner);
  if (!added) fail(ErrorCode::kInvalidArgument, "shared memory of {}: arena {} announced twice", owner, arena.id);
}

RemoteRegion ArenaTable::region(const MemoryDesc& memory, const std::string& owner) const {
  if (memory.kind == MemoryDesc::Kind::kRingOnly) return {.caps = {Access::kStream}};
  const auto found = arenas_.find(memory.arena);
  if (found == arenas_.end())
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: arena {} was never announced", owner, memory.arena);
  const MappedArena& arena = found->second;
  if (memory.offset > arena.bytes() || memory.bytes > arena.bytes() - memory.offset)
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: {} bytes at {} leave arena {} of {} bytes", owner,
         memory.bytes, memory.offset, memory.arena, arena.bytes());
  RemoteRegion region{.caps = {Access::kGet}, .space = memory.arena, .offset = memory.offset};
  if (arena.data() == nullptr) return region;
  region.caps = {Access::kMap, Access::kGet};
  region.mapped = arena.data() + memory.offset;
  return region;
}

Status ArenaTable::get(uint64_t space, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const {
  const MappedArena& arena = arenas_.at(static_cast<uint32_t>(space));
  return scatter(pieces, out, [&](uint64_t offset, std::span<std::byte> part) { return arena.read(offset, part); });
}

}  // namespace tessera
