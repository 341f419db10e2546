// Shared memory whose pages are only allocated on request, so that unused parts cost nothing. They are never allocated
// by a page fault, which would kill the process if no memory is left.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace tessera {

class SharedArena;

// One arena of SharedHeap::process(), which can locate it while this object lives. Thread-safe.
class SparseMemory {
 public:
  // Reserves address space only. `owner` is a name for messages. Throws Error(kResourceExhausted).
  SparseMemory(size_t bytes, std::string_view owner);
  ~SparseMemory();
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  std::byte* data() const;
  size_t size() const { return bytes_; }
  // Allocates the pages of [data() + offset, data() + offset + bytes), zeroed if they are new; false if no memory is
  // left. Pages that are not allocated must not be accessed.
  bool take(size_t offset, size_t bytes);

 private:
  const size_t bytes_;
  std::shared_ptr<SharedArena> arena_;
};

}  // namespace tessera
