// Sums of squares in f64, in one order whatever the kernel: the square of element i is added to lane i mod 8, and the
// lanes are added from the first to the last. So the same elements give the same bits on every CPU.
#pragma once

#include <cstddef>

#include "tessera/dtype.h"

namespace tessera {

// f64, f32, f16 and bf16.
bool sums_squares(DType dtype);

// Of `n` elements at `values`, which may be unaligned. NaN if one of them is. Throws kInvalidArgument for other types.
double sum_of_squares(DType dtype, const std::byte* values, size_t n);

}  // namespace tessera
