// One memfd of shared memory, and the free list that blocks are cut from. SharedHeap (tessera/memory.h) owns a set of
// them; a peer that is given the descriptor opens it as a MappedArena.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/fd.h"

namespace tessera {

// Thread-safe. Blocks are multiples of kGranule bytes; neighbouring free ones are merged.
class SharedArena {
 public:
  static constexpr size_t kGranule = 64;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kMinBytes = size_t{64} << 20;

  // Creates, allocates, maps and seals `bytes` (rounded up to kHugePage). Throws Error(kResourceExhausted).
  SharedArena(uint32_t id, size_t bytes);
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  uint32_t id() const { return id_; }  // unique in this process
  int fd() const { return fd_.get(); }
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
  void seal();

  const uint32_t id_;
  const size_t bytes_;
  const pid_t owner_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;

  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;       // offset -> bytes
  std::map<size_t, size_t> allocated_;  // offset -> bytes
  size_t pristine_ = 0;                 // bytes from here on were never handed out: still zero
};

}  // namespace tessera
