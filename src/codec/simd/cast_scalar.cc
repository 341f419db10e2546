// The reference casts: codec/float/float_bits.h, one element after another.
#include <type_traits>

#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename From, typename To>
void cast_row(const void* src, void* dst, size_t n) {
  for (size_t i = 0; i < n; ++i) store_at(dst, i, To::encode(From::decode(load_at<typename From::Bits>(src, i))));
}

template <typename From, typename To>
void set_pair(CastKernels& kernels, size_t from, size_t to) {
  if constexpr (!std::is_same_v<From, To>) kernels.row[from][to] = kernels.stream_row[from][to] = cast_row<From, To>;
}

template <typename From, typename... To>
void set_row(CastKernels& kernels, size_t from, TypeList<To...>) {
  size_t to = 0;
  (set_pair<From, To>(kernels, from, to++), ...);
}

template <typename... From>
CastKernels make_kernels(TypeList<From...> types) {
  CastKernels kernels{.target = "scalar", .row = {}, .stream_row = {}};
  size_t from = 0;
  (set_row<From>(kernels, from++, types), ...);
  return kernels;
}

}  // namespace

const CastKernels& scalar_cast() {
  static const CastKernels kernels = make_kernels(CastTypes{});
  return kernels;
}

}  // namespace tessera::codec
