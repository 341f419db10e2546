#include <algorithm>
#include <cstring>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/fold_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

template <typename T, bool kFirst>
HWY_NOINLINE void fold_steps(const std::byte* src, float scale, std::byte* acc, size_t steps) {
  const DF d;
  const auto factor = hn::Set(d, scale);
  for (; steps > 0; --steps, src += hn::Lanes(d) * sizeof(typename T::Bits), acc += hn::Lanes(d) * sizeof(float)) {
    auto* out = at<float>(acc);
    const auto term = hn::Mul(hn::BitCast(d, Lane<T>::load(src)), factor);
    if constexpr (kFirst) {
      hn::StoreU(term, d, out);
    } else {
      hn::StoreU(hn::Add(hn::LoadU(d, out), term), d, out);
    }
  }
}

template <typename T, bool kFirst>
void fold(const void* src, float scale, void* acc, size_t n) {
  constexpr size_t kFrom = sizeof(typename T::Bits);
  constexpr size_t kVectorBytes = hn::MaxLanes(D()) * sizeof(float);
  const size_t lanes = hn::Lanes(DF());
  const size_t whole = n - n % lanes;
  const auto* in = static_cast<const std::byte*>(src);
  auto* out = static_cast<std::byte*>(acc);
  fold_steps<T, kFirst>(in, scale, out, n / lanes);
  if (whole == n) return;
  HWY_ALIGN std::byte last_in[kVectorBytes] = {};
  HWY_ALIGN std::byte last_out[kVectorBytes] = {};
  std::memcpy(last_in, in + whole * kFrom, (n - whole) * kFrom);
  if (!kFirst) std::memcpy(last_out, out + whole * sizeof(float), (n - whole) * sizeof(float));
  fold_steps<T, kFirst>(last_in, scale, last_out, 1);
  std::memcpy(out + whole * sizeof(float), last_out, (n - whole) * sizeof(float));
}

template <typename... T>
FoldKernels make_kernels(TypeList<T...>) {
  return {.target = hwy::TargetName(HWY_TARGET), .first = {fold<T, true>...}, .next = {fold<T, false>...}};
}

const FoldKernels& fold_kernels() {
  static const FoldKernels kernels = make_kernels(FoldedTypes{});
  return kernels;
}

#else
const FoldKernels& fold_kernels() {
  return scalar_fold();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(fold_kernels);
const FoldKernels& simd_fold(int64_t target) {
  return TESSERA_CALL_TARGET(fold_kernels, target);
}

}  // namespace tessera::codec
#endif
