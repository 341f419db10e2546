// Casts of contiguous rows between any two of the float types f64, f32, f16, bf16, E4M3 and E5M2. They go through f32,
// with the rounding, saturation and NaNs of codec/float/float_bits.h. From any dtype to itself the bits do not change.
#pragma once

#include <cstddef>

#include "codec/simd/kernel.h"
#include "tessera/dtype.h"

namespace tessera {

// Casts n elements. Either pointer may be unaligned; the rows must not overlap. Thread-safe, never throws; expects the
// default floating-point environment.
using CastRow = void (*)(const void* src, void* dst, size_t n);

// True from a dtype to itself, and between the six float types above. (is_castable_float says which casts a transfer
// may do without being asked.)
bool castable(DType from, DType to);

// To be looked up once a batch, not once a row. Throws Error(kInvalidArgument) unless castable. For f4 n must be even.
CastRow cast_row(DType from, DType to);

// The same result, written past the caches, for destinations that will not be read soon. It pays for rows of about 256
// destination bytes and more. Call stream_fence() (codec/simd/stream.h) before you tell another thread about the data.
CastRow cast_row_stream(DType from, DType to);

}  // namespace tessera
