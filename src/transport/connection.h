// What this process can reach of one peer's memory. Made by a Transport (transport.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"
#include "tessera/error.h"
#include "transport/memory_desc.h"

namespace tessera {

// A run of bytes within a MemoryDesc.
struct Piece {
  uint64_t offset = 0;  // from the start of the described range
  uint64_t bytes = 0;
};

// Thread-safe, but for add_arena().
class Connection {
 public:
  virtual ~Connection() = default;

  virtual const std::string& name() const = 0;  // "trainer/3", for messages

  // Makes one of the peer's arenas reachable. Throws Error(kInvalidArgument) for a descriptor that is not what `arena`
  // says. Call before any thread uses this object.
  virtual void add_arena(const ArenaDesc& arena, UniqueFd fd) = 0;

  // Where `memory` can be read directly, by ordinary loads, as long as this object lives; null if it cannot.
  // Throws Error(kInvalidArgument) if the peer has registered no such range.
  virtual const std::byte* mapped(const MemoryDesc& memory) const = 0;

  // One-sided get: the bytes of all `pieces`, one after the other, into all of `out`, one after the other. Never
  // throws. REQUIRES: both sum up alike; pieces lie within `memory`, which mapped() has accepted. Fails with kPeerLost
  // if the peer died, kPermissionDenied if it may not be read.
  virtual Status get(const MemoryDesc& memory, std::span<const Piece> pieces,
                     std::span<const std::span<std::byte>> out) const = 0;

  // Whether get() may read the peer's private memory (tried once, at connection).
  virtual bool can_get_private() const = 0;
};

}  // namespace tessera
