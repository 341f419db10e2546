// Runs an operation over a row whose blocks of elements share a multiplier. Included once for each Highway target.
//
// An operation has in_bytes(n) and out_bytes(n), the bytes of n elements, and a step(in, first, second, out) on two
// vectors of elements, whose multipliers are `first` and `second`.
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "codec/simd/kernel_set.h"
#include "codec/simd/simd_target.h"

#if defined(TESSERA_CODEC_SCALED_RUNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CODEC_SCALED_RUNS_INL_H_
#undef TESSERA_CODEC_SCALED_RUNS_INL_H_
#else
#define TESSERA_CODEC_SCALED_RUNS_INL_H_
#endif

#include "codec/float/float_vec-inl.h"

#if TESSERA_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {

using VF = hn::Vec<DF>;

// The number of elements in a step.
HWY_INLINE size_t step_lanes() {
  return 2 * hn::Lanes(D());
}

// For fewer elements than a step.
template <typename Op>
HWY_INLINE void run_tail(const std::byte* in, size_t n, VF first, VF second, std::byte* out) {
  HWY_ALIGN std::byte last_in[2 * hn::MaxLanes(D()) * sizeof(float)] = {};
  HWY_ALIGN std::byte last_out[2 * hn::MaxLanes(D()) * sizeof(float)];
  std::memcpy(last_in, in, Op::in_bytes(n));
  Op::step(last_in, first, second, last_out);
  std::memcpy(out, last_out, Op::out_bytes(n));
}

template <typename Op>
HWY_NOINLINE void run_shared(const std::byte* in, size_t n, float multiplier, std::byte* out) {
  const VF shared = hn::Set(DF(), multiplier);
  size_t i = 0;
  for (; i + step_lanes() <= n; i += step_lanes())
    Op::step(in + Op::in_bytes(i), shared, shared, out + Op::out_bytes(i));
  if (i < n) run_tail<Op>(in + Op::in_bytes(i), n - i, shared, shared, out + Op::out_bytes(i));
}

template <typename Op>
HWY_INLINE void run_each(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  const size_t lanes = hn::Lanes(D());
  size_t i = 0;
  for (; i + step_lanes() <= n; i += step_lanes()) {
    const float* m = multipliers + i;
    Op::step(in + Op::in_bytes(i), hn::LoadU(DF(), m), hn::LoadU(DF(), m + lanes), out + Op::out_bytes(i));
  }
  if (i == n) return;
  HWY_ALIGN float last[2 * hn::MaxLanes(D())] = {};
  std::memcpy(last, multipliers + i, (n - i) * sizeof(float));
  run_tail<Op>(in + Op::in_bytes(i), n - i, hn::LoadU(DF(), last), hn::LoadU(DF(), last + lanes),
               out + Op::out_bytes(i));
}

// For steps with two blocks.
template <typename Op, size_t kBlock>
HWY_INLINE void run_pairs_of_blocks(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  size_t i = 0;
  for (; i + 2 * kBlock <= n; i += 2 * kBlock, multipliers += 2)
    Op::step(in + Op::in_bytes(i), hn::Set(DF(), multipliers[0]), hn::Set(DF(), multipliers[1]),
             out + Op::out_bytes(i));
  if (i == n) return;
  const float second = n - i > kBlock ? multipliers[1] : multipliers[0];
  run_tail<Op>(in + Op::in_bytes(i), n - i, hn::Set(DF(), multipliers[0]), hn::Set(DF(), second),
               out + Op::out_bytes(i));
}

template <typename Op, size_t kBlock>
HWY_INLINE void run_blocks(const std::byte* in, size_t n, const float* multipliers, std::byte* out) {
  if constexpr (kBlock == hn::MaxLanes(D())) {  // which is the number of lanes on existing targets
    return run_pairs_of_blocks<Op, kBlock>(in, n, multipliers, out);
  }
  const size_t whole = n - n % kBlock;
  for (size_t i = 0; i < whole; i += kBlock) {
    const VF shared = hn::Set(DF(), *multipliers++);
    for (size_t j = i; j < i + kBlock; j += step_lanes())
      Op::step(in + Op::in_bytes(j), shared, shared, out + Op::out_bytes(j));
  }
  if (whole < n) run_shared<Op>(in + Op::in_bytes(whole), n - whole, *multipliers, out + Op::out_bytes(whole));
}

template <typename Op>
void run(const void* src, size_t n, size_t block, const float* multipliers, void* dst) {
  const auto* in = static_cast<const std::byte*>(src);
  auto* out = static_cast<std::byte*>(dst);
  switch (block) {
    case kEach:
      return run_each<Op>(in, n, multipliers, out);
    case 16:
      return run_blocks<Op, 16>(in, n, multipliers, out);
    case 32:
      return run_blocks<Op, 32>(in, n, multipliers, out);
    case kWholeRow:
      return run_shared<Op>(in, n, *multipliers, out);
    default:
      for (size_t i = 0; i < n; i += block)
        run_shared<Op>(in + Op::in_bytes(i), std::min(block, n - i), *multipliers++, out + Op::out_bytes(i));
  }
}

}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TESSERA_SIMD_TARGET

#endif  // include guard
