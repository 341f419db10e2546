// Digests of parts of a tensor (docs/formats/digest.md): those of disjoint parts that cover it add up to the tensor's.
#pragma once

#include <cstddef>
#include <span>

#include "codec/simd/digest.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::checkpoint {

// Returns the digest of the elements of `region` (global coordinates), which lie packed row-major in `packed`; of the
// whole region if the tensor has it all. Throws Error(kInvalidArgument) for a region outside the shape, and for one
// that cuts an F4 tensor inside a byte. REQUIRES: `packed` holds exactly bytes_of(dtype, region.size()) bytes.
Digest digest_of_region(DType dtype, const Shape& shape, const Region& region, std::span<const std::byte> packed);

}  // namespace tessera::checkpoint
