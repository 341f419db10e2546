// Shared memory whose pages are allocated only where its owner asks for them, so that most of it may cost nothing.
// They are never allocated by a page fault, which would kill the process if there is no memory left.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace tessera {

class SharedArena;

// One arena of SharedHeap::process(), which knows where it lies as long as this lives. Thread-safe.
class SparseMemory {
 public:
  // Only address space. `owner` is a name for messages. Throws Error(kResourceExhausted).
  SparseMemory(size_t bytes, std::string_view owner);
  ~SparseMemory();
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  std::byte* data() const;
  size_t size() const { return bytes_; }
  // Allocates the pages of [data() + offset, data() + offset + bytes), zeroed if they are new; false if there is no
  // memory left. Pages that are not allocated must be neither written nor read.
  bool take(size_t offset, size_t bytes);

 private:
  const size_t bytes_;
  std::shared_ptr<SharedArena> arena_;
};

}  // namespace tessera
