// The reference fold.
#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename T, bool kFirst>
void fold(const void* src, float scale, void* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float term = T::decode(load_at<typename T::Bits>(src, i)) * scale;
    store_at(acc, i, kFirst ? term : load_at<float>(acc, i) + term);
  }
}

template <typename... T>
FoldKernels make_fold_kernels(TypeList<T...>) {
  return {.target = "scalar", .first = {fold<T, true>...}, .next = {fold<T, false>...}};
}

}  // namespace

const FoldKernels& scalar_fold() {
  static const FoldKernels kernels = make_fold_kernels(FoldedTypes{});
  return kernels;
}

}  // namespace tessera::codec
