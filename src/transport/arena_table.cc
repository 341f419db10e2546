#include "transport/arena_table.h"

#include <utility>

#include "base/fail.h"

namespace tessera {

void ArenaTable::add(const ArenaDesc& arena, UniqueFd fd, const std::string& owner) {
  const auto [entry, added] = arenas_.try_emplace(arena.id, std::move(fd), arena.bytes, owner);
  if (!added) fail(ErrorCode::kInvalidArgument, "shared memory of {}: arena {} announced twice", owner, arena.id);
}

const MappedArena& ArenaTable::find(const MemoryDesc& memory, const std::string& owner) const {
  const auto found = arenas_.find(memory.arena);
  if (found == arenas_.end())
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: arena {} was never announced", owner, memory.arena);
  const MappedArena& arena = found->second;
  if (memory.offset > arena.bytes() || memory.bytes > arena.bytes() - memory.offset)
    fail(ErrorCode::kInvalidArgument, "shared memory of {}: {} bytes at {} leave arena {} of {} bytes", owner,
         memory.bytes, memory.offset, memory.arena, arena.bytes());
  return arena;
}

}  // namespace tessera
