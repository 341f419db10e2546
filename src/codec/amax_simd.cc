#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "codec/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/amax_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

// Magnitudes compare like the integers of their bits. A kernel takes all elements for finite, and leaves the row to
// the reference if the largest magnitude turns out not to be.
template <typename T>
struct Magnitudes {
  using Int = std::make_signed_t<typename T::Bits>;
  using DInt = hn::ScalableTag<Int>;
  using Vec = hn::Vec<DInt>;
  static constexpr Int kSignless = static_cast<Int>(static_cast<typename T::Bits>(~0ULL) >> 1);
  static constexpr Int kInf = static_cast<Int>(T::encode(std::numeric_limits<float>::infinity()));

  static HWY_INLINE size_t lanes() { return hn::Lanes(DInt()); }
  static HWY_INLINE Vec load(const std::byte* p) {
    return hn::And(hn::LoadU(DInt(), at<Int>(p)), hn::Set(DInt(), kSignless));
  }
  static HWY_INLINE bool nonfinite(Vec largest) {
    return !hn::AllFalse(DInt(), hn::Gt(largest, hn::Set(DInt(), kInf - 1)));
  }
};

// Maxima of neighbours: of `low`, then of `high`.
template <typename D, typename Vec>
HWY_INLINE Vec halve(D d, Vec low, Vec high) {
  return hn::Max(hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low));
}

inline constexpr size_t kSmallBlock = 16;

// Of kSmallBlock vectors, the maxima of each kSmallBlock elements, and what all their lanes hold at most.
template <typename T>
HWY_INLINE hn::Vec<typename Magnitudes<T>::DInt> small_blocks(const std::byte* in) {
  using M = Magnitudes<T>;
  const typename M::DInt d;
  const size_t step = M::lanes() * sizeof(typename T::Bits);
  const auto quad = [&](size_t first) HWY_ATTR {
    const std::byte* p = in + first * step;
    return halve(d, halve(d, M::load(p), M::load(p + step)), halve(d, M::load(p + 2 * step), M::load(p + 3 * step)));
  };
  return halve(d, halve(d, quad(0), quad(4)), halve(d, quad(8), quad(12)));
}

// `maxima` of small blocks to amaxes of blocks of `small` small ones, in f32.
template <typename T>
HWY_INLINE void widen(const std::byte* maxima, size_t n, float* amax) {
  HWY_ALIGN float values[hn::MaxLanes(D())];
  for (size_t i = 0; i < n; i += hn::Lanes(D())) {
    hn::StoreU(hn::BitCast(DF(), Lane<T>::load(maxima + i * sizeof(typename T::Bits))), DF(), values);
    std::copy_n(values, std::min(n - i, hn::Lanes(D())), amax + i);
  }
}

// Blocks of 1, 2 or 8 small ones; the largest take several steps where a vector has few lanes.
template <typename T>
bool amax_of_blocks(const void* src, size_t n, size_t block, float* amax) {
  using M = Magnitudes<T>;
  using Int = typename M::Int;
  const typename M::DInt d;
  constexpr size_t kMaxRatio = 8;
  const size_t lanes = M::lanes();
  const size_t step = kSmallBlock * lanes;  // elements
  const size_t ratio = block / kSmallBlock;
  const size_t group = std::max(step, block);
  const auto* in = static_cast<const std::byte*>(src);
  auto largest = hn::Zero(d);
  HWY_ALIGN Int maxima[std::max(hn::MaxLanes(d), kMaxRatio) + hn::MaxLanes(D())];
  float* out = amax;
  for (size_t first = 0; first < n; first += group) {
    const size_t end = std::min(n, first + group);
    Int* next = maxima;
    for (size_t i = first; i < end; i += step, next += lanes) {
      auto small = hn::Zero(d);
      if (i + step <= end) {
        small = small_blocks<T>(in + i * sizeof(Int));
      } else {
        HWY_ALIGN std::byte last[kSmallBlock * hn::MaxLanes(d) * sizeof(Int)] = {};
        std::memcpy(last, in + i * sizeof(Int), (end - i) * sizeof(Int));
        small = small_blocks<T>(last);
      }
      largest = hn::Max(largest, small);
      hn::Store(small, d, next);
    }
    size_t blocks = (end - first + kSmallBlock - 1) / kSmallBlock;
    if (ratio > 1) {
      const size_t whole = (end - first + block - 1) / block;
      for (size_t b = 0; b < whole; ++b)
        maxima[b] = *std::max_element(maxima + b * ratio, maxima + std::min((b + 1) * ratio, blocks));
      blocks = whole;
    }
    widen<T>(reinterpret_cast<const std::byte*>(maxima), blocks, out);
    out += blocks;
  }
  return M::nonfinite(largest) && scalar_amax().blocks[kIndexOf<T>](src, n, block, amax);
}

template <typename T>
HWY_INLINE hn::Vec<typename Magnitudes<T>::DInt> largest_of_row(const std::byte* in, size_t n) {
  using M = Magnitudes<T>;
  const typename M::DInt d;
  constexpr size_t kAccumulators = 4;
  const size_t step = M::lanes() * sizeof(typename T::Bits);
  const size_t bytes = n * sizeof(typename T::Bits);
  auto a = hn::Zero(d);
  auto b = a;
  auto c = a;
  auto e = a;
  size_t i = 0;
  for (; i + kAccumulators * step <= bytes; i += kAccumulators * step) {
    a = hn::Max(a, M::load(in + i));
    b = hn::Max(b, M::load(in + i + step));
    c = hn::Max(c, M::load(in + i + 2 * step));
    e = hn::Max(e, M::load(in + i + 3 * step));
  }
  for (; i + step <= bytes; i += step) a = hn::Max(a, M::load(in + i));
  if (i < bytes) {
    HWY_ALIGN std::byte last[hn::MaxLanes(d) * sizeof(typename T::Bits)] = {};
    std::memcpy(last, in + i, bytes - i);
    a = hn::Max(a, M::load(last));
  }
  return hn::Max(hn::Max(a, b), hn::Max(c, e));
}

template <typename T>
bool amax_of_row(const void* src, size_t n, float& amax) {
  using M = Magnitudes<T>;
  const auto largest = largest_of_row<T>(static_cast<const std::byte*>(src), n);
  if (M::nonfinite(largest)) return scalar_amax().row[kIndexOf<T>](src, n, amax);
  HWY_ALIGN typename M::Int values[hn::MaxLanes(typename M::DInt())];
  hn::Store(largest, typename M::DInt(), values);
  const auto most = *std::max_element(values, values + M::lanes());
  amax = std::max(amax, T::decode(static_cast<typename T::Bits>(most)));
  return false;
}

template <typename T>
bool fold_magnitudes(const void* src, size_t n, void* magnitudes) {
  using M = Magnitudes<T>;
  const typename M::DInt d;
  const size_t step = M::lanes() * sizeof(typename T::Bits);
  const size_t bytes = n * sizeof(typename T::Bits);
  const auto* in = static_cast<const std::byte*>(src);
  auto* out = static_cast<std::byte*>(magnitudes);
  // A pass that only looks comes first: magnitudes once raised cannot be taken back.
  if (M::nonfinite(largest_of_row<T>(in, n))) return scalar_amax().fold[kIndexOf<T>](src, n, magnitudes);
  size_t i = 0;
  for (; i + step <= bytes; i += step) {
    auto* to = at<typename M::Int>(out + i);
    hn::StoreU(hn::Max(hn::LoadU(d, to), M::load(in + i)), d, to);
  }
  if (i < bytes) {
    HWY_ALIGN std::byte last_in[hn::MaxLanes(d) * sizeof(typename T::Bits)] = {};
    HWY_ALIGN std::byte last_out[sizeof(last_in)] = {};
    std::memcpy(last_in, in + i, bytes - i);
    std::memcpy(last_out, out + i, bytes - i);
    const auto both = hn::Max(hn::LoadU(d, at<typename M::Int>(last_out)), M::load(last_in));
    hn::StoreU(both, d, at<typename M::Int>(last_out));
    std::memcpy(out + i, last_out, bytes - i);
  }
  return false;
}

template <typename... T>
AmaxKernels make_kernels(TypeList<T...>) {
  return {.target = hwy::TargetName(HWY_TARGET),
          .blocks = {amax_of_blocks<T>...},
          .row = {amax_of_row<T>...},
          .fold = {fold_magnitudes<T>...}};
}

const AmaxKernels& amax_kernels() {
  static const AmaxKernels kernels = make_kernels(QuantizedTypes{});
  return kernels;
}

#else
const AmaxKernels& amax_kernels() {
  return scalar_amax();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(amax_kernels);
const AmaxKernels& simd_amax(int64_t target) {
  return TESSERA_CALL_TARGET(amax_kernels, target);
}

}  // namespace tessera::codec
#endif
