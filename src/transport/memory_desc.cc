#include "transport/memory_desc.h"

#include "base/fail.h"
#include "memory/host/shared_arena.h"
#include "tessera/memory.h"

namespace tessera {

void ArenaDesc::write(ByteWriter& out) const {
  out.put(id);
  out.put(bytes);
}

ArenaDesc ArenaDesc::read(ByteReader& in) {
  ArenaDesc arena;
  arena.id = in.get<uint32_t>();
  arena.bytes = in.get<uint64_t>();
  if (arena.bytes == 0 || arena.bytes > uint64_t{INT64_MAX})
    fail(ErrorCode::kInvalidArgument, "arena {}: a size of {} bytes", arena.id, arena.bytes);
  return arena;
}

void MemoryDesc::write(ByteWriter& out) const {
  out.put(kind);
  out.put(arena);
  out.put(offset);
  out.put(bytes);
}

MemoryDesc MemoryDesc::read(ByteReader& in) {
  MemoryDesc memory;
  memory.kind = in.get_enum(Kind::kRingOnly);
  memory.arena = in.get<uint32_t>();
  memory.offset = in.get<uint64_t>();
  memory.bytes = in.get<uint64_t>();
  if (memory.bytes > uint64_t{INT64_MAX} || memory.offset > uint64_t{INT64_MAX} - memory.bytes)
    fail(ErrorCode::kInvalidArgument, "memory: {} bytes at {:#x} wrap around", memory.bytes, memory.offset);
  return memory;
}

MemoryDesc describe_memory(const void* data, size_t bytes) {
  if (const auto found = SharedHeap::process().locate(data, bytes); found && bytes > 0)
    return {.kind = MemoryDesc::Kind::kShared, .arena = found->arena->id(), .offset = found->offset, .bytes = bytes};
  return {.kind = MemoryDesc::Kind::kPrivate, .offset = reinterpret_cast<uintptr_t>(data), .bytes = bytes};
}

}  // namespace tessera
