// Mistakes that a build with tests can be told to make, one at a time, so that a test can show that it would find them.
// Each is made at one place. Other builds have no way to ask for one, and no branch for it. A fault of a
// frame is made by the first process that sends such a frame.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

enum class Mutation : uint8_t {
  kNone,
  kLocalAmax,       // a rank quantises with the amaxes of matrices that it has found, not with all ranks'
  kLocalBlockAmax,  // likewise of blocks that it does not hold whole
  kSpoiledCode,     // a byte of a wire piece is not what was digested: of a code,
  kSpoiledScale,    // of a scale,
  kSpoiledAmax,     // or of an amax
  kStaleCopy,       // a quantised copy is sent though its elements have changed
  kCopyIgnored,     // elements are quantised though there is a copy
  kStaleBase,       // a delta is taken on top of whatever a receiver holds
  // Of Extended Tensor Parallelism; kLocalAmax there, too.
  kNoWriteAfterRead,       // a recycled buffer is written without waiting for its last reader
  kNeighboursShareBuffer,  // two uses in a row get one buffer
  kSkippedWait,            // a prefetched weight is used without waiting for its gather
  kHookBeforeAdd,          // a round is reported before its fold has ended
  kLastReductionDropped,   // sums that are left when an interval ends are dropped
  kStampNotCompared,       // a buffer is used for whatever is wanted
  kFoldFromZero,           // a fold ignores what is accumulated
  kFoldsOutOfOrder,        // rounds of one weight are folded in another order
  kRetireNotAwaited,       // an update begins while peers may read
  kGradientReturnedEarly,  // a gradient's buffer is free once this rank has folded it
  kWordBeforeData,         // a word says that data is there before it is
  kDrainForgetsHead,       // gradients of a weight for which this rank had none are not folded
  kUnorderedIteration,     // a list is gone through in an order that differs between ranks
  kPaddingInLogicalRows,   // rows of padding count as a weight's
  kCapturedAddressReused,  // a gather that was prepared for one buffer serves for another
  kCaptureNotReserved,     // others get a buffer whose address a capture has
};

// What happens to a frame between two ranks.
enum class FrameFault : uint8_t {
  kNone,
  kUnsaid,   // its sender leaves it out: a peer that does not answer
  kLost,     // it was sent and does not arrive
  kDoubled,  // it arrives twice
  kDelayed,  // it arrives after the next one
  kChanged,  // one byte of it differs
};

#ifdef TESSERA_MUTATIONS
// In memory that the processes of a test share. One fault, of the frame of that type after `skip` others.
struct FrameFaults {
  std::atomic<FrameFault> fault{FrameFault::kNone};  // set last
  std::atomic<uint16_t> type{0};
  std::atomic<int> skip{0};
  std::atomic<uint32_t> place{0};  // of the byte, modulo the payload's size
  FrameFault take(uint16_t sent) {
    if (fault.load() == FrameFault::kNone || type.load() != sent || skip.fetch_sub(1) > 0) return FrameFault::kNone;
    return fault.exchange(FrameFault::kNone);
  }
};
inline std::atomic<FrameFaults*>& frame_faults() {
  static std::atomic<FrameFaults*> asked{nullptr};
  return asked;
}
inline FrameFault frame_fault(uint16_t type) {
  FrameFaults* const faults = frame_faults().load(std::memory_order_relaxed);
  return faults == nullptr ? FrameFault::kNone : faults->take(type);
}

inline std::atomic<Mutation>& mutation() {
  static std::atomic<Mutation> asked{Mutation::kNone};
  return asked;
}
inline bool mutated(Mutation which) {
  return mutation().load(std::memory_order_relaxed) == which;
}
#else
constexpr FrameFault frame_fault(uint16_t) {
  return FrameFault::kNone;
}
constexpr bool mutated(Mutation) {
  return false;
}
#endif

}  // namespace tessera
