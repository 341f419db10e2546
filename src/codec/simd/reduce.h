// Reductions of Partial tensors, row by row: every source is folded into an accumulator of a wider type, and the last
// step rounds once to the source's dtype. The caller passes the sources in ascending rank order, so that sums are
// reproducible; the operations are done in that order, without contraction to FMA.
//
//   accumulate_row(op, dtype, true)(sources[0], acc, n);
//   for each further source s: accumulate_row(op, dtype, false)(s, acc, n);
//   finish_row(op, dtype)(acc, dst, n, count);
//
// f64 accumulates in f64; f32, f16 and bf16 in f32; c64 as two f32 (its product is the complex product); integers in
// their own type, wrapping. avg divides by the count at the end, in the accumulator's type, and is refused for
// integers. min and max propagate NaN, keep the earlier source's value among equal ones (-0 and +0 are equal) and are
// refused for c64. Bool and floats of 8 bits and less cannot be reduced. If the result is NaN, it is the canonical one
// of codec/float/float_bits.h.
#pragma once

#include <cstddef>

#include "codec/simd/kernel.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera {

bool reducible(ReduceOp op, DType dtype);

// The type of the accumulator's elements. Throws Error(kInvalidArgument) for a dtype that no op reduces.
DType accumulator_of(DType dtype);

// Folds n elements of `src` into `acc` (n elements of accumulator_of). Either may be unaligned; no overlap.
using AccumulateRow = void (*)(const void* src, void* acc, size_t n);
// `first`: the accumulator is written, not read. Throws Error(kInvalidArgument) unless reducible.
AccumulateRow accumulate_row(ReduceOp op, DType src, bool first);

// Writes n results of dtype `src`. `count` is the number of sources folded in; only avg uses it. dst may be acc.
using FinishRow = void (*)(const void* acc, void* dst, size_t n, int count);
FinishRow finish_row(ReduceOp op, DType src);

}  // namespace tessera
