#include "collective/movement/fold_rows.h"

#include "codec/simd/fold.h"

namespace tessera::collective {

void fold_rows(const FoldRows& rows, std::span<const std::byte* const> terms) {
  if (terms.empty()) return;
  fold_row(rows.gradient_dtype, rows.accumulated_dtype, rows.first)(
      terms.data(), terms.size(), rows.scale, rows.accumulated, static_cast<size_t>(rows.elements));
}

}  // namespace tessera::collective
