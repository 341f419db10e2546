// Merges what the ranks of a side register into one list, and matches the lists of two sides. Pure values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bus/registration/manifest.h"

namespace tessera::bus {

// The side's tensors as one list: in rank 0's order, then what other ranks add, by rank. diffs[r] is rank r's, diffs[0]
// is empty. A name registered with disjoint meshes and equal shape, dtype and placements becomes one entry with a
// leading "replica" axis. If nothing differs, the result is `rank0` itself. Throws Error(kMismatch), which lists every
// disagreement (job/rank, tensor and field), the first 20 in full.
std::shared_ptr<const Manifest> merge(const std::string& job, const std::shared_ptr<const Manifest>& rank0,
                                      std::span<const ManifestDiff> diffs);

// The tensors that a batch moves, in the order in which all ranks of both sides plan them.
struct Match {
  // A tensor of the sender that is taken only in part.
  struct Whole {
    Shape shape;
    Layout layout;
    std::vector<Slice> slices;
  };
  struct Tensor {
    std::string name = {};    // the receiver's
    std::string source = {};  // the sender's
    Shape shape;
    DType src_dtype = DType::kF32;
    DType dst_dtype = DType::kF32;
    Layout src;                                 // over ranks of the sending job
    Layout dst;                                 // over ranks of the receiving job
    std::optional<Whole> of = std::nullopt;     // if `shape` and `src` are a slice of it
    std::optional<Format> wire = std::nullopt;  // the format that it travels in
    bool encoded = false;                       // the sender has it in that format already
    PlaneSet planes = {};                       // received as they are; none: received as floats
    // The transpose of the last two dims travels, and `shape`, `src` and `dst` describe it: for a column plane whose
    // blocks differ from the row plane's.
    bool transposed = false;
    // Tensors that are quantised together have the same group: the position of the first of them in `tensors`; its own
    // position if it has no others. Tensors with a place in a fused tensor also share blocks.
    uint32_t group = 0;
    std::optional<FusedPart::Place> fused = std::nullopt;
  };
  std::vector<Tensor> tensors;  // the sender's order; for one source, the receiver's
  int64_t skipped = 0;          // names that only the sender has
};

// Throws Error(kMismatch), which lists every name that the sender lacks, every shape, dtype, layout or wire format that
// does not fit, and every slice that cannot be taken.
Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job);

}  // namespace tessera::bus
