// Transposing codes of quantised matrices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/dtype.h"

namespace tessera::codec {

// Rows of `from` to columns of `to`; strides in bytes from one row to the next. `codes`: an 8-bit type, or f4, of which
// rows and columns are even and lie in whole bytes. Allocates nothing; thread-safe.
void transpose_codes(DType codes, const std::byte* from, int64_t from_stride, int64_t rows, int64_t columns,
                     std::byte* to, int64_t to_stride) noexcept;

}  // namespace tessera::codec
