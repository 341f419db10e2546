// The arenas of one peer, by the ids that it gave them, and the check that everything it describes lies within them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "memory/host/mapped_arena.h"
#include "transport/memory_desc.h"

namespace tessera {

class ArenaTable {
 public:
  // Throws Error(kInvalidArgument) for an id seen before or a descriptor that is not what `arena` says.
  void add(const ArenaDesc& arena, UniqueFd fd, const std::string& owner);
  // The arena that holds `memory`. Throws Error(kInvalidArgument) if none does. REQUIRES: memory is shared.
  const MappedArena& find(const MemoryDesc& memory, const std::string& owner) const;

 private:
  std::map<uint32_t, MappedArena> arenas_;
};

}  // namespace tessera
