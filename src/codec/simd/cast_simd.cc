#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/cast_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"
#include "codec/simd/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

// The part that differs between pairs casts `steps` times kVectors vectors.
inline constexpr size_t kVectors = 2;
inline constexpr size_t kPrefetch = 2048;  // bytes ahead: the processor needs a hint for them
using Steps = void (*)(const std::byte* HWY_RESTRICT in, std::byte* HWY_RESTRICT out, size_t steps);

template <typename From, typename To>
void cast_steps(const std::byte* HWY_RESTRICT in, std::byte* HWY_RESTRICT out, size_t steps) {
  const size_t from = hn::Lanes(D()) * sizeof(typename From::Bits);
  const size_t to = hn::Lanes(D()) * sizeof(typename To::Bits);
  for (; steps > 0; --steps, in += kVectors * from, out += kVectors * to) {
    __builtin_prefetch(in + kPrefetch);
    const V low = Lane<From>::load(in);
    const V high = Lane<From>::load(in + from);
    if constexpr (sizeof(typename To::Bits) == 1) {
      store_two<To, kHasEightBits<From>>(low, high, out);
    } else {
      Lane<To>::store(low, out);
      Lane<To>::store(high, out + to);
    }
  }
}

struct CastPair {
  Steps steps;
  size_t from;  // bytes an element
  size_t to;
};

HWY_NOINLINE void cast_elements(const CastPair& pair, const std::byte* in, std::byte* out, size_t n) {
  const size_t step = kVectors * hn::Lanes(D());
  const size_t whole = n - n % step;
  pair.steps(in, out, n / step);
  if (whole == n) return;
  HWY_ALIGN std::byte last_in[kVectors * hn::MaxLanes(D()) * sizeof(double)] = {};
  HWY_ALIGN std::byte last_out[sizeof(last_in)];
  std::memcpy(last_in, in + whole * pair.from, (n - whole) * pair.from);
  pair.steps(last_in, last_out, 1);
  std::memcpy(out + whole * pair.to, last_out, (n - whole) * pair.to);
}

// Casts into a buffer in the first-level cache and streams from there, in pieces that end at ends of lines of `out`.
HWY_NOINLINE void cast_elements_stream(const CastPair& pair, const std::byte* in, std::byte* out, size_t n) {
  alignas(kLine) std::byte buffer[4096];
  size_t piece = (sizeof(buffer) - kLine + to_line(out)) / pair.to;
  while (n > 0) {
    piece = std::min(piece, n);
    cast_elements(pair, in, buffer, piece);
    stream_bytes(out, buffer, piece * pair.to);
    in += piece * pair.from;
    out += piece * pair.to;
    n -= piece;
    piece = sizeof(buffer) / pair.to;
  }
}

template <typename From, typename To>
inline constexpr CastPair kPair{cast_steps<From, To>, sizeof(typename From::Bits), sizeof(typename To::Bits)};

template <typename From, typename To>
void cast_row(const void* src, void* dst, size_t n) {
  cast_elements(kPair<From, To>, static_cast<const std::byte*>(src), static_cast<std::byte*>(dst), n);
}

template <typename From, typename To>
void cast_row_stream(const void* src, void* dst, size_t n) {
  cast_elements_stream(kPair<From, To>, static_cast<const std::byte*>(src), static_cast<std::byte*>(dst), n);
}

template <typename From, typename To>
void set_pair(CastKernels& kernels, size_t from, size_t to) {
  if constexpr (!std::is_same_v<From, To>) {
    kernels.row[from][to] = cast_row<From, To>;
    kernels.stream_row[from][to] = cast_row_stream<From, To>;
  }
}

template <typename From, typename... To>
void set_row(CastKernels& kernels, size_t from, TypeList<To...>) {
  size_t to = 0;
  (set_pair<From, To>(kernels, from, to++), ...);
}

template <typename... From>
CastKernels make_kernels(TypeList<From...> types) {
  CastKernels kernels{.target = hwy::TargetName(HWY_TARGET), .row = {}, .stream_row = {}};
  size_t from = 0;
  (set_row<From>(kernels, from++, types), ...);
  return kernels;
}

const CastKernels& cast_kernels() {
  static const CastKernels kernels = make_kernels(CastTypes{});
  return kernels;
}

#else
const CastKernels& cast_kernels() {
  return scalar_cast();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(cast_kernels);
const CastKernels& simd_cast(int64_t target) {
  return TESSERA_CALL_TARGET(cast_kernels, target);
}

}  // namespace tessera::codec
#endif
