// Folds of gradients, row by row: acc = acc + f32(src) * scale, in f32, the product rounded before it is added.
// Elements of f32 that reduce.h's accumulate_row(ReduceOp::kSum, dtype, true) loads and its finish_row() rounds.
#pragma once

#include <cstddef>

#include "codec/simd/kernel.h"
#include "tessera/dtype.h"

namespace tessera {

// f32, f16 and bf16.
bool foldable(DType dtype);

// Folds n elements. Either pointer may be unaligned; no overlap. Subnormals are kept; which NaN comes out of NaNs is
// not said. Thread-safe, never throws; expects the default floating-point environment.
using FoldRow = void (*)(const void* src, float scale, void* acc, size_t n);
// `first`: acc = f32(src) * scale; acc is not read. Throws Error(kInvalidArgument) unless foldable.
FoldRow fold_row(DType src, bool first);

}  // namespace tessera
