// The shared memory that ranks of a group read of each other: arenas of this rank that peers may ask for, and arenas of
// peers that are mapped here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/fd.h"
#include "base/mutex.h"
#include "memory/host/mapped_arena.h"
#include "memory/host/shared_arena.h"

namespace tessera::collective {

// Thread-safe.
class Arenas {
 public:
  // Of this rank, for peers, as long as some block of it lives.
  // True if it was not shown yet.
  bool show(const std::shared_ptr<SharedArena>& arena);
  std::shared_ptr<SharedArena> shown(uint32_t arena) const;  // null if there is none (any more)

  // Of a peer. `take` takes one only after `want`, once: false otherwise.
  const MappedArena* find(int rank, uint32_t arena) const;  // null if it is not mapped; lives as long as this
  bool want(int rank, uint32_t arena);                      // whether it was not wanted yet
  bool take(int rank, uint32_t arena, std::unique_ptr<MappedArena> mapped);
  // The peer says that it has no such arena: find() stays null. False as for take().
  bool refuse(int rank, uint32_t arena);
  bool refused(int rank, uint32_t arena) const;

 private:
  using Key = std::pair<int, uint32_t>;

  mutable Mutex mutex_;
  std::map<uint32_t, std::weak_ptr<SharedArena>> shown_ GUARDED_BY(mutex_);
  std::map<Key, std::unique_ptr<MappedArena>> mapped_ GUARDED_BY(mutex_);
  std::set<Key> wanted_ GUARDED_BY(mutex_);
  std::set<Key> refused_ GUARDED_BY(mutex_);
};

}  // namespace tessera::collective
