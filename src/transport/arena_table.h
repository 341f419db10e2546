// The arenas of one peer, by the ids that it gave them, and the check that everything it describes lies within them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "memory/host/mapped_arena.h"
#include "transport/connection.h"

namespace tessera {

class ArenaTable {
 public:
  static constexpr uint64_t kNoArena = UINT64_MAX;  // a space that is none of an arena

  // Throws Error(kInvalidArgument) for an id seen before or a descriptor that is not what `arena` says.
  void add(const ArenaDesc& arena, UniqueFd fd, const std::string& owner);
  // How `memory` is reached, which is in an arena or for streams only. Throws Error(kInvalidArgument) if no arena holds
  // it.
  RemoteRegion region(const MemoryDesc& memory, const std::string& owner) const;
  // Connection::get() of an arena's space.
  Status get(uint64_t space, std::span<const Piece> pieces, std::span<const std::span<std::byte>> out) const;

 private:
  std::map<uint32_t, MappedArena> arenas_;
};

}  // namespace tessera
