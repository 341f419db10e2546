// Applies the faults of base/mutation.h to the frames that a connection sends. Does nothing in builds without tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/framing.h"
#include "base/mutation.h"

namespace tessera {

class SpoiltFrames {
 public:
  struct Sent {
    uint16_t type = 0;
    uint32_t stream = 0;
    uint16_t check = 0;
    std::span<const std::byte> payload;
  };
#ifdef TESSERA_MUTATIONS
  // Returns whether it has handled the frame, which the caller then must not queue.
  bool spoil(FrameFault fault, const Sent& sent, FrameWriter& writer) {
    switch (fault) {
      case FrameFault::kNone:
      case FrameFault::kUnsaid:
      case FrameFault::kDoubled:
        return false;
      case FrameFault::kLost:
        return true;
      case FrameFault::kDelayed:
        delayed_ = sent;
        kept_.assign(sent.payload.begin(), sent.payload.end());
        return true;
      case FrameFault::kChanged:
        Sent changed = sent;
        kept_.assign(sent.payload.begin(), sent.payload.end());
        changed.payload = kept_;
        if (kept_.empty())
          changed.check ^= 1;
        else
          kept_[frame_faults().load()->place % kept_.size()] ^= std::byte{0x5A};
        queue(changed, writer);
        return true;
    }
    return false;
  }
  // Queues the frames that a fault puts after this one.
  void follow(FrameFault fault, const Sent& sent, FrameWriter& writer) {
    if (fault == FrameFault::kDoubled) queue(sent, writer);
    if (!delayed_ || fault == FrameFault::kDelayed) return;
    delayed_->payload = kept_;
    queue(*delayed_, writer);
    delayed_.reset();
  }

 private:
  static void queue(const Sent& sent, FrameWriter& writer) {
    writer.push_last(sent.type, sent.payload, sent.stream, sent.check);
  }
  std::optional<Sent> delayed_;
  std::vector<std::byte> kept_;
#else
  static constexpr bool spoil(FrameFault, const Sent&, FrameWriter&) { return false; }
  static constexpr void follow(FrameFault, const Sent&, FrameWriter&) {}
#endif
};

}  // namespace tessera
