// How one process tells another where its memory lies. Values that go over the wire; reading one checks its form, and
// whoever uses it checks its bounds (Connection).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace tessera {

// An arena's name and size; its descriptor travels beside it (SCM_RIGHTS).
struct ArenaDesc {
  uint32_t id = 0;  // SharedArena::id() in the process that owns it
  uint64_t bytes = 0;

  void write(ByteWriter& out) const;
  static ArenaDesc read(ByteReader& in);
  bool operator==(const ArenaDesc&) const = default;
};

// A range of bytes in the process that sends this value.
struct MemoryDesc {
  enum class Kind : uint8_t {
    kPrivate,   // `offset` is an address in that process
    kShared,    // `offset` counts from the start of arena `arena`
    kRingOnly,  // its owner packs it into a bounce ring, and nobody else reads it; `offset` counts from its first byte
  };
  Kind kind = Kind::kPrivate;
  uint32_t arena = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;

  void write(ByteWriter& out) const;
  static MemoryDesc read(ByteReader& in);
  bool operator==(const MemoryDesc&) const = default;
};

// Where [data, data + bytes) of this process lies: shared if one block of SharedHeap::process() holds it.
MemoryDesc describe_memory(const void* data, size_t bytes);

}  // namespace tessera
