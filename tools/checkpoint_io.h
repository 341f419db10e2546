// Local tensors and files: filling them from a checkpoint, checking them against one, writing them out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>

#include "tessera/checkpoint.h"
#include "tools/held_tensors.h"

namespace tessera::tools {

class Interrupt;

// Reads this rank's slice of every tensor. Along the axes that are Partial(sum) or Partial(product) the first rank
// holds the slice, the others hold the neutral element (-0.0 for sums of floats, so that even a zero keeps its sign; 1
// for products); of avg, min and max every rank holds the slice. Throws as Checkpoint::read_slice does, and
// Error(kInvalidArgument) for a product of a dtype that has no 1.
void load_slices(const Checkpoint& checkpoint, const HeldTensors& held, const Interrupt& interrupt);

// Compares every local tensor, bit for bit, with its slice of a checkpoint, cast as the bus casts where the dtypes
// differ. One that travelled quantised is compared with the file's tensor quantised as a whole, and back. `wires`: by
// tensor, what it travelled as; empty: all as they are. Throws Error(kDataLoss) that names the first tensor that
// differs, its global index and both values, or that is not in the checkpoint with that shape.
void verify_slices(const Checkpoint& checkpoint, const HeldTensors& held, std::span<const std::optional<Format>> wires,
                   const Interrupt& interrupt);

// Writes FOLDER/rank-00000.safetensors, replacing it: the local tensors of this rank, those it holds nothing of left
// out. Metadata: `version`, and `tensors`, a JSON text {"name":{"shape":[],"dtype":"","layout":""}} with the global
// shapes. Returns the path. docs/formats/checkpoint-files.md.
std::filesystem::path write_slices(const std::filesystem::path& folder, const HeldTensors& held, int64_t version);

}  // namespace tessera::tools
