// Reduction of the terms of one element, one value at a time: the reference of the reduction kernels.
#pragma once

#include <cstddef>
#include <span>

#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::plan {

// Writes to `result` the reduction of the values at `terms`, in their order. REQUIRES: `op` reduces `dtype` (bind.h).
// Pointers may be unaligned.
void reduce_terms(ReduceOp op, DType dtype, std::span<const std::byte* const> terms, std::byte* result);

}  // namespace tessera::plan
