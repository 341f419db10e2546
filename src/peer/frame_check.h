// Checks that the frames of a connection arrive as they were sent: each once, in order and unchanged. So two peers
// never wait for each other because a frame was lost, and neither acts on a frame that the other has not sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

// One direction of a connection. Each end has one for the frames that it sends and one for those that it reads.
class FrameCheck {
 public:
  // The check in the head of the next frame (docs/formats/bus-protocol.md). It covers that frame and all before it.
  uint16_t next(uint16_t type, uint32_t stream, std::span<const std::byte> payload);

 private:
  uint64_t sum_ = 0;
};

}  // namespace tessera
