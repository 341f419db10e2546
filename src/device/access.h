// Bytes that an operation or the host reads or writes, as the checker of schedules (record/) wants them declared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::device {

// A value. `version` is the owner's own count of what the bytes hold; 0 where that means nothing.
struct Access {
  const void* data = nullptr;
  size_t bytes = 0;
  bool write = false;
  uint64_t version = 0;
};

inline Access read_of(const void* data, size_t bytes, uint64_t version = 0) {
  return {.data = data, .bytes = bytes, .write = false, .version = version};
}
inline Access write_of(const void* data, size_t bytes, uint64_t version = 0) {
  return {.data = data, .bytes = bytes, .write = true, .version = version};
}

// A word in shared memory that grows only, and orders ranks: who has seen `value` or more in it happens after the
// write of the first such value. Ranks are those of the recorder; who owns the words numbers them.
struct WordEdge {
  int rank = 0;  // that writes it
  uint64_t word = 0;
  uint64_t value = 0;
  bool operator==(const WordEdge&) const = default;
};

}  // namespace tessera::device
