// The reference fold.
#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename T, typename A, bool kFirst>
void fold(const std::byte* const* terms, size_t count, float scale, void* accumulated, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto term = [&](size_t t) { return T::decode(load_at<typename T::Bits>(terms[t], i)) * scale; };
    float acc = kFirst ? term(0) : A::decode(load_at<typename A::Bits>(accumulated, i));
    for (size_t t = kFirst ? 1 : 0; t < count; ++t) acc = acc + term(t);
    store_at(accumulated, i, A::encode(acc));
  }
}

template <bool kFirst, typename T, typename... A>
FoldTable::value_type fold_kernels_of(TypeList<A...>) {
  return {fold<T, A, kFirst>...};
}

template <typename... T>
FoldKernels make_fold_kernels(TypeList<T...> accumulated) {
  return {.target = "scalar",
          .first = {fold_kernels_of<true, T>(accumulated)...},
          .next = {fold_kernels_of<false, T>(accumulated)...}};
}

}  // namespace

const FoldKernels& scalar_fold() {
  static const FoldKernels kernels = make_fold_kernels(FoldedTypes{});
  return kernels;
}

}  // namespace tessera::codec
