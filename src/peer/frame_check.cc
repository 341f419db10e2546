#define XXH_INLINE_ALL
#include "peer/frame_check.h"

#include <xxhash.h>

#include <array>

namespace tessera {

uint16_t FrameCheck::next(uint16_t type, uint32_t stream, std::span<const std::byte> payload) {
  const std::array<uint64_t, 3> frame{sum_, uint64_t{type} << 32 | stream, XXH3_64bits(payload.data(), payload.size())};
  sum_ = XXH3_64bits(frame.data(), sizeof(frame));
  return static_cast<uint16_t>(sum_);
}

}  // namespace tessera
