// The contents of shm's keys, and the keys of one peer. A key is for an arena, whose descriptor it has; for the private
// memory of its process, where offsets are addresses; or for memory that its owner packs into a stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "memory/host/mapped_arena.h"
#include "memory/host/shared_arena.h"
#include "transport/connection.h"

namespace tessera {

class KeyTable {
 public:
  static RemoteKey key_of_private_memory();
  static RemoteKey key_of_packed_memory();
  static RemoteKey key_of(SharedArena& arena);  // seals the arena for peers from now on

  // Throws Error(kInvalidArgument) like Connection::add_key().
  void add(uint32_t index, RemoteKey key, const std::string& owner);
  // How a range is accessed. For private memory: all ways that may be possible.
  RemoteRegion region(const RemoteRange& range, const std::string& owner) const;
  // The arena that kGet reads; null: private memory.
  const MappedArena* arena(uint32_t key) const;

 private:
  enum class Kind : uint8_t { kPrivate, kArena, kPacked };
  static RemoteKey make_key(Kind kind, const SharedArena* arena = nullptr);

  struct Entry {
    Kind kind = Kind::kPrivate;
    uint32_t arena_id = 0;  // in its owner's numbering
    std::unique_ptr<const MappedArena> arena;
  };
  static Entry read(const RemoteKey& key, uint64_t& arena_bytes);

  std::map<uint32_t, Entry> keys_;
};

}  // namespace tessera
