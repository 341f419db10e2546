// Folds of gradients, in one pass over all of them: each element of `accumulated` is widened to f32, takes the elements
// of all terms in their order, acc = acc + f32(term) * scale, the product rounded before it is added, and is rounded
// once, to what it was.
#pragma once

#include <cstddef>

#include "codec/simd/kernel.h"
#include "tessera/dtype.h"

namespace tessera {

// f32, f16 and bf16.
bool foldable(DType dtype);

// Folds n elements of `count` terms, at least one. Any pointer may be unaligned; `accumulated` overlaps no term.
// Subnormals are kept; a NaN result is the canonical one (codec/float/float_bits.h). Thread-safe, never throws; expects
// the default floating-point environment.
using FoldRow = void (*)(const std::byte* const* terms, size_t count, float scale, void* accumulated, size_t n);
// `first`: acc = f32(terms[0]) * scale to begin with; `accumulated` is not read. Throws Error(kInvalidArgument) unless
// both are foldable.
FoldRow fold_row(DType term, DType accumulated, bool first);

}  // namespace tessera
