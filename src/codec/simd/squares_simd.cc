#include <algorithm>
#include <type_traits>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/squares_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

using V64 = hn::Vec<D64>;

// The sums of the lanes: vector k has those from lane k * kWide on.
inline constexpr size_t kWide = hn::MaxLanes(D64());
inline constexpr size_t kVectors = kSquareLanes / kWide;

HWY_INLINE void add_square(V64& sum, V64 value) {
  sum = hn::Add(sum, hn::Mul(value, value));  // not fused, as the reference
}

// Adds the squares of kStep<T> elements. The loops have lengths that the compiler knows.
template <typename T>
inline constexpr size_t kStep = std::max(kSquareLanes, (std::is_same_v<T, F64> ? 1 : 2) * kWide);

template <typename T>
HWY_INLINE void add_step(const std::byte* p, V64* sums) {
  if constexpr (std::is_same_v<T, F64>) {
    for (size_t k = 0; k < kVectors; ++k) add_square(sums[k], hn::LoadU(D64(), at<double>(p) + k * kWide));
  } else {
    for (size_t i = 0; i < kStep<T>; i += 2 * kWide) {
      const auto values = hn::BitCast(DF(), Lane<T>::load(p + i * sizeof(typename T::Bits)));
      const size_t k = i / kWide;
      add_square(sums[k % kVectors], hn::PromoteTo(D64(), hn::LowerHalf(values)));
      add_square(sums[(k + 1) % kVectors], hn::PromoteTo(D64(), hn::UpperHalf(hn::Half<DF>(), values)));
    }
  }
}

template <typename T, size_t kType>
void add(const std::byte* values, size_t n, double* lanes) {
  const D64 d;
  V64 sums[kVectors];
  for (size_t k = 0; k < kVectors; ++k) sums[k] = hn::LoadU(d, lanes + k * kWide);
  size_t i = 0;
  for (; i + kStep<T> <= n; i += kStep<T>) add_step<T>(values + i * sizeof(typename T::Bits), sums);
  for (size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[k], d, lanes + k * kWide);
  // A step is a multiple of the lanes.
  scalar_squares().add[kType](values + i * sizeof(typename T::Bits), n - i, lanes);
}

const SquareKernels& square_kernels() {
  static const SquareKernels kernels{.target = hwy::TargetName(HWY_TARGET),
                                     .add = {add<F64, 0>, add<F32, 1>, add<F16, 2>, add<BF16, 3>}};
  return kernels;
}

#else
const SquareKernels& square_kernels() {
  return scalar_squares();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(square_kernels);
const SquareKernels& simd_squares(int64_t target) {
  return TESSERA_CALL_TARGET(square_kernels, target);
}

}  // namespace tessera::codec
#endif
