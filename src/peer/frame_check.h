// Tells whether the frames of a connection arrive as they were sent: each once, in order and unchanged. Two peers that
// have read the same frames cannot wait for each other because one was lost, and never act on one that nobody sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// The frames of one direction. Each end has one for what it sends and one for what it reads.
class FrameCheck {
 public:
  // The check in the head of the next frame (docs/formats/bus-protocol.md). It covers that frame and all before it.
  uint16_t next(uint16_t type, uint32_t stream, std::span<const std::byte> payload);

 private:
  uint64_t sum_ = 0;
};

}  // namespace tessera
