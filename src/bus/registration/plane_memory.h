// Tensors that are received into planes, or sent from them (TensorSpec::planes): which may be registered, and where
// their bytes are.
#pragma once

#include <optional>
#include <string>

#include "bus/registration/local_tensors.h"
#include "tessera/bus.h"
#include "tessera/layout.h"

namespace tessera::bus {

// The dtype of its codes. Throws Error(kInvalidArgument) if there is no format or it is not a matrix, for strides, for
// rows or columns that cannot be packed, and if an edge of any rank's shard is inside a block of a plane that is there;
// kUnimplemented for a part of a fused tensor. REQUIRES: `layout` is bound to the spec's shape.
DType require_planes(const TensorSpec& spec, const Layout& layout);

// The given `planes` in the registered block of memory, for what this rank owns (as registered).
LocalTensor local_planes(const std::string& name, const TensorSpec& spec, Region owned, PlaneSet planes);

// One of them, as a sender's tensor is sent from it. `travels`: what this rank owns of the tensor that travels, which
// may be the transpose of the registered one.
LocalTensor sent_plane(const std::string& name, const TensorSpec& spec, Region owned, Plane plane, Region travels);
// Likewise, of the spec's quantised copy; none if an edge of what this rank owns is inside a block. Throws
// Error(kInvalidArgument) unless there is a block of memory for each of its matrices.
std::optional<PlaneSource> copied_plane(const TensorSpec& spec, const Region& owned, Plane plane, Region travels);

}  // namespace tessera::bus
