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

using VF = hn::Vec<DF>;

template <typename T>
HWY_INLINE VF widened(const std::byte* p) {
  return hn::BitCast(DF(), Lane<T>::load(p));
}

// What the CPU's own prefetchers miss: the beginnings of pages, of several memories at once.
HWY_INLINE void prefetch_ahead(const std::byte* p, size_t bytes) {
  constexpr size_t kAhead = 2048;
  constexpr size_t kLine = 64;
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + kAhead + i);
}

// The elements from `at` on: so many vectors, each of which goes its own way, so that they fill the adders.
template <typename T, typename A, bool kFirst, size_t kVectors>
HWY_INLINE void fold_step(const std::byte* const* terms, size_t count, VF factor, std::byte* accumulated, size_t at) {
  const size_t lanes = hn::Lanes(DF());
  constexpr size_t kTermBytes = sizeof(typename T::Bits);
  constexpr size_t kAccBytes = sizeof(typename A::Bits);
  std::byte* const out = accumulated + at * kAccBytes;
  VF acc[kVectors];
  size_t t = 0;
  if constexpr (kFirst) {
    const std::byte* const in = terms[t++] + at * kTermBytes;
    prefetch_ahead(in, kVectors * lanes * kTermBytes);
    for (size_t v = 0; v < kVectors; ++v) acc[v] = hn::Mul(widened<T>(in + v * lanes * kTermBytes), factor);
  } else {
    prefetch_ahead(out, kVectors * lanes * kAccBytes);
    for (size_t v = 0; v < kVectors; ++v) acc[v] = widened<A>(out + v * lanes * kAccBytes);
  }
  for (; t < count; ++t) {
    const std::byte* const in = terms[t] + at * kTermBytes;
    prefetch_ahead(in, kVectors * lanes * kTermBytes);
    for (size_t v = 0; v < kVectors; ++v)
      acc[v] = hn::Add(acc[v], hn::Mul(widened<T>(in + v * lanes * kTermBytes), factor));
  }
  for (size_t v = 0; v < kVectors; ++v) Lane<A>::store(hn::BitCast(D(), acc[v]), out + v * lanes * kAccBytes);
}

// The last elements, fewer than a vector.
template <typename T, typename A, bool kFirst>
void fold_rest(const std::byte* const* terms, size_t count, VF factor, std::byte* accumulated, size_t at, size_t n) {
  constexpr size_t kVectorBytes = hn::MaxLanes(D()) * sizeof(float);
  HWY_ALIGN std::byte term[kVectorBytes] = {};
  HWY_ALIGN std::byte out[kVectorBytes] = {};
  std::byte* const end = accumulated + at * sizeof(typename A::Bits);
  if (!kFirst) std::memcpy(out, end, n * sizeof(typename A::Bits));
  VF acc = widened<A>(out);
  for (size_t t = 0; t < count; ++t) {
    std::memcpy(term, terms[t] + at * sizeof(typename T::Bits), n * sizeof(typename T::Bits));
    const VF product = hn::Mul(widened<T>(term), factor);
    acc = kFirst && t == 0 ? product : hn::Add(acc, product);
  }
  Lane<A>::store(hn::BitCast(D(), acc), out);
  std::memcpy(end, out, n * sizeof(typename A::Bits));
}

template <typename T, typename A, bool kFirst>
void fold(const std::byte* const* terms, size_t count, float scale, void* accumulated, size_t n) {
  constexpr size_t kVectors = 4;
  const size_t lanes = hn::Lanes(DF());
  const VF factor = hn::Set(DF(), scale);
  auto* const out = static_cast<std::byte*>(accumulated);
  size_t i = 0;
  for (; i + kVectors * lanes <= n; i += kVectors * lanes)
    fold_step<T, A, kFirst, kVectors>(terms, count, factor, out, i);
  for (; i + lanes <= n; i += lanes) fold_step<T, A, kFirst, 1>(terms, count, factor, out, i);
  if (i < n) fold_rest<T, A, kFirst>(terms, count, factor, out, i, n - i);
}

template <bool kFirst, typename T, typename... A>
FoldTable::value_type kernels_of(TypeList<A...>) {
  return {fold<T, A, kFirst>...};
}

template <typename... T>
FoldKernels make_kernels(TypeList<T...> accumulated) {
  return {.target = hwy::TargetName(HWY_TARGET),
          .first = {kernels_of<true, T>(accumulated)...},
          .next = {kernels_of<false, T>(accumulated)...}};
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
