#include "collective/shared/arenas.h"

namespace tessera::collective {

bool Arenas::show(const std::shared_ptr<SharedArena>& arena) {
  const MutexLock lock(mutex_);
  std::erase_if(shown_, [](const auto& entry) { return entry.second.expired(); });
  return shown_.emplace(arena->id(), arena).second;
}

std::shared_ptr<SharedArena> Arenas::shown(uint32_t arena) const {
  const MutexLock lock(mutex_);
  const auto found = shown_.find(arena);
  return found == shown_.end() ? nullptr : found->second.lock();
}

const MappedArena* Arenas::find(int rank, uint32_t arena) const {
  const MutexLock lock(mutex_);
  const auto found = mapped_.find({rank, arena});
  return found == mapped_.end() ? nullptr : found->second.get();
}

bool Arenas::want(int rank, uint32_t arena) {
  const MutexLock lock(mutex_);
  return wanted_.insert({rank, arena}).second;
}

bool Arenas::take(int rank, uint32_t arena, std::unique_ptr<MappedArena> mapped) {
  const MutexLock lock(mutex_);
  if (!wanted_.contains({rank, arena}) || refused_.contains({rank, arena})) return false;
  return mapped_.emplace(Key{rank, arena}, std::move(mapped)).second;
}

bool Arenas::refuse(int rank, uint32_t arena) {
  const MutexLock lock(mutex_);
  if (!wanted_.contains({rank, arena}) || mapped_.contains({rank, arena})) return false;
  return refused_.insert({rank, arena}).second;
}

bool Arenas::refused(int rank, uint32_t arena) const {
  const MutexLock lock(mutex_);
  return refused_.contains({rank, arena});
}

}  // namespace tessera::collective
