// The tensors of this rank as the user registered them: checked, described, and compared with each other.
#pragma once

#include <functional>
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
  // bytes or, with `current`, its elements, which are there, too.
  std::optional<PlaneSource> encoded{};
  std::function<bool(uint32_t slot)> current{};  // whether the plane in that slot is that of the elements

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

// Whether the quantised copy of specs[i] is that of its elements, in a slot.
using CopyIsCurrent = std::function<bool(size_t spec, uint32_t slot)>;

// This rank's local tensors in the order of `match`. `sends` picks the side; quantised copies are left out without
// `current`.
std::vector<LocalTensor> local_tensors(const Match& match, std::span<const TensorSpec> specs, Rank rank, bool sends,
                                       const CopyIsCurrent& current = {});

// For every tensor, the first one that is stored at exactly the same place (itself if there is none before it): ties.
// Throws Error(kInvalidArgument), which names both, if two destinations overlap otherwise.
std::vector<uint32_t> find_ties(std::span<const LocalTensor> tensors);

}  // namespace tessera::bus
