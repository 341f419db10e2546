// What the ranks of a side register, as one list, and what two sides have to do with each other. Pure values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bus/registration/manifest.h"

namespace tessera::bus {

// The side's tensors as one list: rank 0's order, then what other ranks add, by rank. diffs[r] is rank r's, diffs[0] is
// empty. A name registered with disjoint meshes and equal shape, dtype and placements becomes one entry with a leading
// "replica" axis. Where nothing differs it is `rank0` itself. Throws Error(kMismatch) that lists every disagreement
// (job/rank, tensor and field), the first 20 in full.
std::shared_ptr<const Manifest> merge(const std::string& job, const std::shared_ptr<const Manifest>& rank0,
                                      std::span<const ManifestDiff> diffs);

// The tensors a batch moves, in the order that all ranks of both sides plan them.
struct Match {
  // A tensor of the sender's of which only a part is taken.
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
    Layout src;                                 // ranks of the sending job
    Layout dst;                                 // ranks of the receiving job
    std::optional<Whole> of = std::nullopt;     // that `shape` and `src` are a slice of
    std::optional<Format> wire = std::nullopt;  // what it is quantised to on its way
    PlaneSet planes = {};                       // that are received as they are; none: floats
    // What travels is the transpose of the last two dims, as are `shape`, `src` and `dst`: a column plane whose blocks
    // are not those of the row plane.
    bool transposed = false;
    // It is quantised as one with others: their group is the first one's place in `tensors`, its own where there are
    // none. With a place it has blocks together with them, too.
    uint32_t group = 0;
    std::optional<FusedPart::Place> fused = std::nullopt;
  };
  std::vector<Tensor> tensors;  // the sender's order; of one source, the receiver's
  int64_t skipped = 0;          // names that only the sender has
};

// Throws Error(kMismatch) that lists every name the sender lacks, every shape, dtype, layout or wire format that does
// not fit, and every slice that cannot be taken.
Match match(const Manifest& sender, const std::string& sender_job, const Manifest& receiver,
            const std::string& receiver_job);

}  // namespace tessera::bus
