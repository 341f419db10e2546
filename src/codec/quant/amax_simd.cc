#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/amax_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

// Magnitudes compare like the integers of their bits. A kernel assumes that all elements are finite, and leaves the row
// to the reference if the largest magnitude turns out not to be.
template <typename T>
struct Magnitudes {
  using Int = std::make_signed_t<typename T::Bits>;
  using DInt = hn::ScalableTag<Int>;
  using Vec = hn::Vec<DInt>;
  static constexpr size_t kPrefetch = 2048;  // bytes ahead
  static constexpr Int kSignless = static_cast<Int>(static_cast<typename T::Bits>(~0ULL) >> 1);
  static constexpr Int kInf = static_cast<Int>(T::encode(std::numeric_limits<float>::infinity()));

  static HWY_INLINE size_t lanes() { return hn::Lanes(DInt()); }
  static HWY_INLINE Vec load(const std::byte* p) {
    // As an integer, since the address may be invalid.
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + kPrefetch));
    return hn::And(hn::LoadU(DInt(), at<Int>(p)), hn::Set(DInt(), kSignless));
  }
  static HWY_INLINE bool nonfinite(Vec largest) {
    return !hn::AllFalse(DInt(), hn::Gt(largest, hn::Set(DInt(), kInf - 1)));
  }
};

// Maxima of neighbours: of `low`, then of `high`. The 32-bit lanes may hold two 16-bit magnitudes.
template <typename T>
HWY_INLINE V halve(V low, V high) {
  const typename Magnitudes<T>::DInt d;
  const V even = hn::ConcatEven(D(), high, low);
  const V odd = hn::ConcatOdd(D(), high, low);
  return hn::BitCast(D(), hn::Max(hn::BitCast(d, even), hn::BitCast(d, odd)));
}

inline constexpr size_t kSmallBlock = 16;

// The amaxes of blocks of kSmallBlock elements, in f32, for as many elements as fill vectors of amaxes.
template <typename T>
struct SmallBlocks;

template <>
struct SmallBlocks<F32> {
  static constexpr size_t kVectors = kSmallBlock;  // vectors that are read
  V amax;                                          // one in each lane
  V largest() const { return amax; }

  static HWY_INLINE SmallBlocks of(const std::byte* in) {
    const auto quad = [in](size_t first) HWY_ATTR {
      const auto load = [&](size_t i) HWY_ATTR { return Magnitudes<F32>::load(in + (first + i) * sizeof(V)); };
      return halve<F32>(halve<F32>(load(0), load(1)), halve<F32>(load(2), load(3)));
    };
    return {halve<F32>(halve<F32>(quad(0), quad(4)), halve<F32>(quad(8), quad(12)))};
  }
  HWY_INLINE size_t store(float* to) const {
    hn::StoreU(hn::BitCast(DF(), amax), DF(), to);
    return hn::Lanes(D());
  }
};

// For 16-bit types: the second half of the vectors is processed in the upper halves of the first half's lanes.
template <typename T>
struct SmallBlocks {
  static constexpr size_t kVectors = kSmallBlock;
  V both;
  auto largest() const { return hn::BitCast(typename Magnitudes<T>::DInt(), both); }

  static HWY_INLINE V load_two(const std::byte* in, size_t i) {
    const typename Magnitudes<T>::DInt d;
    const auto first = Magnitudes<T>::load(in + i * sizeof(V));
    const auto second = Magnitudes<T>::load(in + (i + kVectors / 2) * sizeof(V));
    // Even magnitudes of the first and odd ones of the second are in place; the others are moved.
    const auto straight = hn::OddEven(second, first);
    const auto crossed = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<16>(hn::BitCast(D(), second))),
                                     hn::BitCast(d, hn::ShiftRight<16>(hn::BitCast(D(), first))));
    return hn::BitCast(D(), hn::Max(straight, crossed));
  }
  static HWY_INLINE SmallBlocks of(const std::byte* in) {
    const auto half = [in](size_t i) HWY_ATTR {
      return halve<T>(halve<T>(load_two(in, i), load_two(in, i + 1)),
                      halve<T>(load_two(in, i + 2), load_two(in, i + 3)));
    };
    return {halve<T>(half(0), half(4))};
  }
  HWY_INLINE size_t store(float* to) const {
    const V first = hn::And(both, bits(0xFFFF));
    const V second = hn::ShiftRight<16>(both);
    hn::StoreU(hn::BitCast(DF(), decode_lanes<T>(first)), DF(), to);
    hn::StoreU(hn::BitCast(DF(), decode_lanes<T>(second)), DF(), to + hn::Lanes(D()));
    return 2 * hn::Lanes(D());
  }
};

// Writes the amax of every small block to `amax`; may write up to two vectors beyond their number. Returns the maxima
// over all elements, by lane.
template <typename T>
HWY_INLINE auto amax_of_small_blocks(const std::byte* in, size_t n, float* amax) {
  using M = Magnitudes<T>;
  using Int = typename M::Int;
  const typename M::DInt d;
  const size_t group = SmallBlocks<T>::kVectors * M::lanes();  // elements
  auto largest = hn::Zero(d);
  size_t i = 0;
  for (; i + group <= n; i += group) {
    const auto blocks = SmallBlocks<T>::of(in + i * sizeof(Int));
    largest = hn::Max(largest, blocks.largest());
    amax += blocks.store(amax);
  }
  if (i < n) {
    HWY_ALIGN std::byte last[SmallBlocks<T>::kVectors * hn::MaxLanes(d) * sizeof(Int)];
    std::memcpy(last, in + i * sizeof(Int), (n - i) * sizeof(Int));
    std::memset(last + (n - i) * sizeof(Int), 0, (group - (n - i)) * sizeof(Int));
    const auto blocks = SmallBlocks<T>::of(last);
    largest = hn::Max(largest, blocks.largest());
    blocks.store(amax);
  }
  return largest;
}

// Maxima of each `ratio` small blocks; the last group may have fewer.
HWY_INLINE void gather_blocks(const float* small, size_t n, size_t ratio, float* amax) {
  size_t first = 0;
  if (ratio == 2) {
    const size_t lanes = hn::Lanes(DF());
    for (; first + 2 * lanes <= n; first += 2 * lanes, amax += lanes) {
      const auto low = hn::LoadU(DF(), small + first);
      const auto high = hn::LoadU(DF(), small + first + lanes);
      hn::StoreU(hn::Max(hn::ConcatEven(DF(), high, low), hn::ConcatOdd(DF(), high, low)), DF(), amax);
    }
  }
  for (; first < n; first += ratio) *amax++ = *std::max_element(small + first, small + std::min(first + ratio, n));
}

template <typename T>
bool amax_of_blocks(const void* src, size_t n, size_t block, float* amax) {
  using M = Magnitudes<T>;
  constexpr size_t kPiece = 2048;  // elements; whole blocks and whole groups
  const auto* in = static_cast<const std::byte*>(src);
  HWY_ALIGN float small[kPiece / kSmallBlock + 2 * hn::MaxLanes(D())];
  float* out = amax;
  auto largest = hn::Zero(typename M::DInt());
  for (size_t i = 0; i < n; i += kPiece) {
    const size_t count = std::min(kPiece, n - i);
    const size_t blocks = (count + kSmallBlock - 1) / kSmallBlock;
    largest = hn::Max(largest, amax_of_small_blocks<T>(in + i * sizeof(typename T::Bits), count, small));
    if (block == kSmallBlock) {
      std::memcpy(out, small, blocks * sizeof(float));
    } else {
      gather_blocks(small, blocks, block / kSmallBlock, out);
    }
    out += (count + block - 1) / block;
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
bool fold_rows(const std::byte* src, size_t stride, size_t rows, size_t n, void* magnitudes) {
  using M = Magnitudes<T>;
  using Int = typename M::Int;
  const typename M::DInt d;
  auto* out = static_cast<Int*>(magnitudes);
  bool nonfinite = false;
  size_t i = 0;
  for (; i + M::lanes() <= n; i += M::lanes()) {
    auto largest = hn::LoadU(d, out + i);
    for (size_t r = 0; r < rows; ++r) largest = hn::Max(largest, M::load(src + r * stride + i * sizeof(Int)));
    if (HWY_UNLIKELY(M::nonfinite(largest))) {
      nonfinite |= scalar_amax().fold[kIndexOf<T>](src + i * sizeof(Int), stride, rows, M::lanes(), out + i);
    } else {
      hn::StoreU(largest, d, out + i);
    }
  }
  if (i < n) nonfinite |= scalar_amax().fold[kIndexOf<T>](src + i * sizeof(Int), stride, rows, n - i, out + i);
  return nonfinite;
}

template <typename... T>
AmaxKernels make_kernels(TypeList<T...>) {
  return {.target = hwy::TargetName(HWY_TARGET),
          .blocks = {amax_of_blocks<T>...},
          .row = {amax_of_row<T>...},
          .fold = {fold_rows<T>...}};
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
