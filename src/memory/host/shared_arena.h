// One memfd of shared memory, and the free list from which blocks are cut. SharedHeap (tessera/memory.h) owns a set of
// them. A peer that gets the descriptor opens it as a MappedArena; the owner's agent daemon opens it as a SharedArena.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>

#include "base/fd.h"
#include "base/mutex.h"

namespace tessera {

// Thread-safe. Blocks are multiples of kGranule bytes; neighbouring free ones are merged.
class SharedArena {
 public:
  static constexpr size_t kGranule = 64;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kMinBytes = size_t{64} << 20;

  // Creates, allocates and maps `bytes` (rounded up to kHugePage), sealed against a change of size. Throws
  // Error(kResourceExhausted).
  SharedArena(uint32_t id, size_t bytes);
  enum class Access { kRead, kWrite };
  // Maps all of another process's arena, as one block. Throws Error(kInvalidArgument) if `fd`, which came from `owner`
  // (a name for messages), is not a memfd sealed against shrinking, and kPermissionDenied if it is to be written but is
  // sealed against that.
  SharedArena(uint32_t id, UniqueFd fd, Access access, std::string_view owner);
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  uint32_t id() const { return id_; }  // unique in this process
  // For a peer: seals the arena against all further writable mappings. Throws Error.
  int fd_for_peer();
  // For the agent that works for this process, which may map it for writing.
  int fd_for_agent() const { return fd_.get(); }
  // Whether an agent can still map it for writing: no peer has its descriptor yet.
  bool writable_elsewhere() const;
  size_t bytes() const { return bytes_; }
  std::byte* data() const { return data_; }

  // A zeroed block, the lowest that fits; null if none does. `alignment` is a power of two, at most 4096.
  std::byte* allocate(size_t bytes, size_t alignment);
  // REQUIRES: `block` came from allocate(). Ignored in a forked child, whose parent still owns the block.
  void release(std::byte* block);
  // Whether one allocated block holds all of [data, data + bytes).
  bool holds(const void* data, size_t bytes) const;

 private:
  void map_and_allocate();
  void seal(int seals);

  const uint32_t id_;
  const size_t bytes_;
  const pid_t owner_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;

  mutable Mutex mutex_;
  std::map<size_t, size_t> free_ GUARDED_BY(mutex_);       // offset -> bytes
  std::map<size_t, size_t> allocated_ GUARDED_BY(mutex_);  // offset -> bytes
  size_t pristine_ GUARDED_BY(mutex_) = 0;                 // bytes from here on were never allocated: still zero
};

}  // namespace tessera
