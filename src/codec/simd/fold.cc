#include "codec/simd/fold.h"

#include "base/fail.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace {

size_t fold_index(DType dtype) {
  if (!foldable(dtype))
    fail(ErrorCode::kInvalidArgument, "cannot fold gradients of {}: they are f32, f16 or bf16"_message,
         to_string(dtype));
  return static_cast<size_t>(dtype) - static_cast<size_t>(DType::kF32);
}

}  // namespace

bool foldable(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

FoldRow fold_row(DType term, DType accumulated, bool first) {
  const codec::FoldKernels& kernels = *codec::active_kernels().fold;
  return (first ? kernels.first : kernels.next)[fold_index(term)][fold_index(accumulated)];
}

}  // namespace tessera
