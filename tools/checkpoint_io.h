// Local tensors and files: fills tensors from a checkpoint, checks them against one, writes them to a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/checkpoint.h"
#include "tools/held_tensors.h"

namespace tessera::tools {

class Interrupt;

// Reads this rank's slice of every tensor. Along axes that are Partial(sum) or Partial(product), the first rank holds
// the slice and the others hold the neutral element (-0.0 for sums of floats, so that even a zero keeps its sign; 1 for
// products); with avg, min and max every rank holds the slice. Throws as Checkpoint::read_slice does, and
// Error(kInvalidArgument) for a product in a dtype without a 1.
void load_slices(const Checkpoint& checkpoint, const HeldTensors& held, const Interrupt& interrupt);

// Compares every tensor with the checksum that the checkpoint notes. Each rank does so with the whole of it, so that
// all ranks refuse a damaged one before anything is sent. `way_out` ends the message. Throws Error(kDataLoss), which
// names file and tensor.
void verify_checksums(const Checkpoint& checkpoint, const Interrupt& interrupt, std::string_view way_out);

// Compares every local tensor, bit for bit, with its slice of a checkpoint, cast as the bus casts if the dtypes differ.
// A tensor that travelled quantised is compared with the file's tensor quantised as a whole and decoded. `wires`: by
// tensor, the format that it travelled in; empty: none was quantised. Throws Error(kDataLoss), which names the first
// tensor that differs, its global index and both values, or a tensor that the checkpoint does not have in that shape.
void verify_slices(const Checkpoint& checkpoint, const HeldTensors& held, std::span<const std::optional<Format>> wires,
                   const Interrupt& interrupt);

// Writes FOLDER/rank-00000.safetensors, replacing it: the local tensors of this rank, except those that it holds
// nothing of. Metadata: `version`, and `tensors`, a JSON text {"name":{"shape":[],"dtype":"","layout":""}} with the
// global shapes; and checksums of the local tensors. Returns the path. docs/formats/checkpoint-files.md.
std::filesystem::path write_slices(const std::filesystem::path& folder, const HeldTensors& held, int64_t version);

}  // namespace tessera::tools
