// The tensors of this rank as the user registered them: checked, described, and compared with each other.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bus/registration/match.h"
#include "exec/walk/route.h"
#include "peer/agent.h"
#include "tessera/bus.h"

namespace tessera::bus {

// What one rank holds of one tensor of the batch. data is null where it holds nothing.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kF32;
  LocalArray array;
  std::byte* data = nullptr;
  // Of one that is received into planes: what they are of, and where they lie. `dtype`, `array` and `data` are those of
  // their bytes then.
  Region held{};
  std::vector<PlaneTarget> planes{};

  bool empty() const { return data == nullptr; }
  ByteExtent extent() const;
};

// The manifest of what this rank registers: default layouts filled in, layouts bound. Throws Error(kInvalidArgument)
// that names the tensor: bad shapes and layouts, names twice, data missing where the rank is in the mesh, strides that
// do not fit the local shape. `fallback` is the layout of specs that bring none; empty: replicated over all ranks.
Manifest manifest_of(const Identity& identity, std::span<const TensorSpec> specs, const Layout& fallback = {});

// The local tensors of what this rank registers, in the order of its manifest.
std::vector<LocalTensor> registered_tensors(const Manifest& manifest, std::span<const TensorSpec> specs, Rank rank);

// This rank's local tensors in the order of `match`. `sends` picks the side.
std::vector<LocalTensor> local_tensors(const Match& match, std::span<const TensorSpec> specs, Rank rank, bool sends);

// For every tensor, the first one that is stored at exactly the same place (itself if none before it is): ties.
// Throws Error(kInvalidArgument) where two destinations overlap otherwise, naming both.
std::vector<uint32_t> find_ties(std::span<const LocalTensor> tensors);

}  // namespace tessera::bus
