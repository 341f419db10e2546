#include "collective/fold_rows.h"

#include <algorithm>
#include <array>

#include "codec/simd/fold.h"
#include "codec/simd/reduce.h"

namespace tessera::collective {

void fold_rows(const FoldRows& rows, std::span<const std::byte* const> terms) {
  if (terms.empty()) return;
  constexpr int64_t kBlock = 4096;  // elements: 16 KiB of f32, which stay in the first cache
  alignas(64) std::array<float, kBlock> acc;
  const AccumulateRow load = accumulate_row(ReduceOp::kSum, rows.accumulated_dtype, true);
  const FinishRow finish = finish_row(ReduceOp::kSum, rows.accumulated_dtype);
  const FoldRow first = fold_row(rows.gradient_dtype, rows.first);
  const FoldRow next = fold_row(rows.gradient_dtype, false);
  for (int64_t begin = 0; begin < rows.elements; begin += kBlock) {
    const auto n = static_cast<size_t>(std::min(kBlock, rows.elements - begin));
    std::byte* const out = static_cast<std::byte*>(rows.accumulated) + bytes_of(rows.accumulated_dtype, begin);
    const int64_t offset = bytes_of(rows.gradient_dtype, begin);
    if (!rows.first) load(out, acc.data(), n);
    first(terms.front() + offset, rows.scale, acc.data(), n);
    for (const std::byte* const term : terms.subspan(1)) next(term + offset, rows.scale, acc.data(), n);
    finish(acc.data(), out, n, 1);
  }
}

}  // namespace tessera::collective
