// The arithmetic of folds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/dtype.h"

namespace tessera::collective {

// `elements` contiguous elements of a fold.
struct FoldRows {
  void* accumulated = nullptr;
  DType accumulated_dtype = DType::kF32;
  DType gradient_dtype = DType::kF32;
  float scale = 1;
  bool first = false;  // `accumulated` is not read: the fold begins with the first term
  int64_t elements = 0;
};

// acc = f32(accumulated); for each term g: acc = acc + f32(g) * scale; accumulated = round(acc), in one pass. Without
// terms nothing is written. Dtypes are foldable (codec/simd/fold.h).
void fold_rows(const FoldRows& rows, std::span<const std::byte* const> terms);

}  // namespace tessera::collective
