#include "codec/simd/fold.h"

#include "base/fail.h"
#include "codec/simd/kernel_set.h"

namespace tessera {

bool foldable(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

FoldRow fold_row(DType src, bool first) {
  if (!foldable(src))
    fail(ErrorCode::kInvalidArgument, "cannot fold gradients of {}: they are f32, f16 or bf16"_message, to_string(src));
  const codec::FoldKernels& kernels = *codec::active_kernels().fold;
  const auto index = static_cast<size_t>(src) - static_cast<size_t>(DType::kF32);
  return first ? kernels.first[index] : kernels.next[index];
}

}  // namespace tessera
