// Tensors that are received into planes (TensorSpec::planes): what may be registered, and where it lies.
#pragma once

#include <string>

#include "bus/registration/local_tensors.h"
#include "tessera/bus.h"
#include "tessera/layout.h"

namespace tessera::bus {

// The dtype of its codes. Throws Error(kInvalidArgument): no format, no matrices, strides, rows or columns that cannot
// be packed, an edge of a shard, of whatever rank, inside a block of a plane that is taken; kUnimplemented for a part
// of a fused tensor. REQUIRES: `layout` is bound to the spec's shape.
DType require_planes(const TensorSpec& spec, const Layout& layout);

// Those of `planes` in the block of memory that the spec registers, of what this rank owns (as registered).
LocalTensor local_planes(const std::string& name, const TensorSpec& spec, Region owned, PlaneSet planes);

}  // namespace tessera::bus
