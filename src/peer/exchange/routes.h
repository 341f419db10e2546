// The routes of a connection, as each end knows them before the two have told each other where memory lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "exec/walk/route.h"

namespace tessera {

// One route as the end that pulls wants it. Attached brings the source's place.
struct WantedRoute {
  PullRoute route;         // without memory, origin, the source's strides and the delta piece
  bool per_route = false;  // see ServedRoute
  bool skipped = false;    // another route writes the same destination from the same source tensor
  // The tensor of which `route` writes a copy. Unset if the tensor cannot be written instead of the copy.
  struct Registered {
    LocalArray dst{};
    std::byte* data = nullptr;
  };
  std::optional<Registered> registered = std::nullopt;
};

// One route in the memory of the end that serves it, in the first slot.
struct ServedRoute {
  SourceRoute route;        // without streamed, digested and delta
  bool per_route = false;   // it has its own place, not the tensor's: reduced, quantised or with deltas
  bool quantised = false;   // it is a wire piece: the owner provides its digests
  uint64_t slot_bytes = 0;  // slot s begins s * slot_bytes after slot 0
  // If it may travel as a delta: its delta piece, in shared memory.
  const std::byte* delta = nullptr;
  size_t delta_bytes = 0;
  uint64_t delta_slot_bytes = 0;
  bool delta_digest = false;  // the delta piece has its own digest
};

}  // namespace tessera
