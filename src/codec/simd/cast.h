// Casts of contiguous rows between float types: f64, f32, f16, bf16, E4M3 and E5M2, each to each, through f32, with the
// rounding, saturation and NaNs of codec/float/float_bits.h. Within one dtype, any, bits move untouched.
#pragma once

#include <cstddef>

#include "codec/simd/kernel.h"
#include "tessera/dtype.h"

namespace tessera {

// Casts n elements. Either pointer may be unaligned; the rows must not overlap. Thread-safe, never throws; expects the
// default floating-point environment.
using CastRow = void (*)(const void* src, void* dst, size_t n);

// True within one dtype, and between the six float types above. (Which casts a transfer may do without being asked is
// is_castable_float's matter.)
bool castable(DType from, DType to);

// Looked up once a batch, not once a row. Throws Error(kInvalidArgument) unless castable. REQUIRES of f4: n is even.
CastRow cast_row(DType from, DType to);

// The same result, written past the caches: for destinations that will not be read soon. Worth it for rows of about
// 256 destination bytes and more. Call stream_fence() (codec/simd/stream.h) before another thread is told of the data.
CastRow cast_row_stream(DType from, DType to);

}  // namespace tessera
