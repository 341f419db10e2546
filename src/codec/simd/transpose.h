// Transposes codes of quantised matrices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/dtype.h"

namespace tessera::codec {

// Turns rows of `from` into columns of `to`. Strides are in bytes from one row to the next. `codes` is an 8-bit type,
// or f4, whose rows and columns are even and lie in whole bytes. Allocates nothing; thread-safe.
void transpose_codes(DType codes, const std::byte* from, int64_t from_stride, int64_t rows, int64_t columns,
                     std::byte* to, int64_t to_stride) noexcept;

}  // namespace tessera::codec
