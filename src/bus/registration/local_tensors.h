// The tensors of this rank as the user registered them: checked, described, and compared with each other.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bus/registration/match.h"
#include "exec/walk/route.h"
#include "exec/wire/plane_reader.h"
#include "peer/agent.h"
#include "tessera/bus.h"

namespace tessera::bus {

// One rank's part of one tensor of the batch. `data` is null if it holds nothing.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kF32;
  LocalArray array;
  std::byte* data = nullptr;
  // For a tensor that is received into planes: the region that they cover, and their layout. `dtype`, `array` and
  // `data` then describe their bytes.
  Region held{};
  std::vector<PlaneTarget> planes{};
  // Of a tensor that is quantised already: the plane that it is sent from. `dtype`, `array` and `data` describe its
  // bytes.
  std::optional<PlaneSource> encoded{};

  bool empty() const { return data == nullptr; }
  ByteExtent extent() const;
};

// The manifest of what this rank registers, with default layouts filled in and layouts bound. Throws
// Error(kInvalidArgument), which names the tensor, for bad shapes and layouts, duplicate names, missing data on a rank
// of the mesh, and strides that do not fit the local shape. `fallback` is the layout of specs without one; empty:
// replicated over all ranks.
Manifest manifest_of(const Identity& identity, std::span<const TensorSpec> specs, const Layout& fallback = {});

// The local tensors of what this rank registers, in the order of its manifest.
std::vector<LocalTensor> registered_tensors(const Manifest& manifest, std::span<const TensorSpec> specs, Rank rank);

// This rank's local tensors in the order of `match`. `sends` picks the side.
std::vector<LocalTensor> local_tensors(const Match& match, std::span<const TensorSpec> specs, Rank rank, bool sends);

// For every tensor, the first one that is stored at exactly the same place (itself if there is none before it): ties.
// Throws Error(kInvalidArgument), which names both, if two destinations overlap otherwise.
std::vector<uint32_t> find_ties(std::span<const LocalTensor> tensors);

}  // namespace tessera::bus
