// Memory that another process can read in place: Tessera's allocator.
//
// Blocks come from memfd arenas (memfd_create, never named shared memory) of at least 64 MiB, advised for huge pages
// and allocated up front with fallocate: if the machine is full, allocation fails here, and never with a fault later.
// The owner seals an arena against shrinking and growing and, before it gives the descriptor to a peer, against any new
// writable mapping: a peer can neither make the owner fault nor write its data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

namespace tessera {

class SharedArena;

// A zeroed block of shared memory. Move-only; the destructor returns the block to its arena.
class SharedBuffer {
 public:
  SharedBuffer() = default;
  SharedBuffer(SharedBuffer&& other) noexcept;
  SharedBuffer& operator=(SharedBuffer&& other) noexcept;
  ~SharedBuffer();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  friend class SharedHeap;
  std::shared_ptr<SharedArena> arena_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The process' arenas. Thread-safe.
class SharedHeap {
 public:
  static SharedHeap& process();

  // Throws Error(kResourceExhausted), which names the bytes wanted and what MemAvailable and the cgroup's memory.max
  // leave. The block starts at a multiple of `alignment` (a power of two, at most 4096). 0 bytes give an empty buffer.
  SharedBuffer allocate(size_t bytes, size_t alignment = 64);

  struct Location {
    std::shared_ptr<SharedArena> arena;
    uint64_t offset = 0;
  };
  // Where [data, data + bytes) lies, if a block of this heap holds all of it.
  std::optional<Location> locate(const void* data, size_t bytes) const;
  // Another process' arena, for which this process works: locate() knows it as long as the result lives. No block is
  // allocated from it. Duplicates `fd`, a memfd that came from `owner` (a name for messages). Throws
  // Error(kInvalidArgument) unless it is sealed against shrinking, and kPermissionDenied if it is to be written and is
  // sealed against that.
  std::shared_ptr<SharedArena> adopt(int fd, bool writes, std::string_view owner);

 private:
  SharedHeap();
  ~SharedHeap();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
