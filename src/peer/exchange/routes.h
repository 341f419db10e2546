// The routes of a connection as its two ends know them before they have told each other where memory lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exec/walk/route.h"

namespace tessera {

// One route as the end that pulls wants it; the source's place comes with Attached.
struct WantedRoute {
  PullRoute route;         // all but memory, origin, the source's strides and the delta piece
  bool per_route = false;  // see ServedRoute
  bool skipped = false;    // another route writes the same destination from the same source tensor
  // What `route` writes is a copy of this tensor. Unset where that one cannot be written in place of the copy.
  struct Registered {
    LocalArray dst{};
    std::byte* data = nullptr;
  };
  std::optional<Registered> registered = std::nullopt;
};

// What a route's source looks like in the memory of the end that serves it, in the first slot.
struct ServedRoute {
  SourceRoute route;        // all but streamed, digested and delta
  bool per_route = false;   // its place is this route's own (reduced), not the tensor's
  bool quantised = false;   // it is a wire piece: its digests are the owner's to give
  uint64_t slot_bytes = 0;  // slot s lies s times as far behind
  // If it may travel as a delta: its piece, in shared memory.
  const std::byte* delta = nullptr;
  size_t delta_bytes = 0;
  uint64_t delta_slot_bytes = 0;
  bool delta_digest = false;  // the piece has a digest of its own
};

}  // namespace tessera
