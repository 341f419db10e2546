#include <cstring>

#include "codec/quant/quantize_formulas.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quant/scale_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

using VF = hn::Vec<DF>;
using DBytes = hn::Rebind<uint8_t, D>;

// Calls step(amaxes, stored, multipliers) for every vector of n blocks; the last step may run past the ends, in a local
// buffer.
template <typename Step>
HWY_INLINE void for_blocks(const float* amax, size_t n, uint8_t* scales, float* multipliers, const Step& step) {
  const size_t lanes = hn::Lanes(D());
  size_t b = 0;
  for (; b + lanes <= n; b += lanes) step(amax + b, scales + b, multipliers + b);
  if (b == n) return;
  HWY_ALIGN float last_amax[hn::MaxLanes(D())] = {};
  HWY_ALIGN float last_multipliers[hn::MaxLanes(D())];
  HWY_ALIGN uint8_t last_scales[hn::MaxLanes(D())];
  std::memcpy(last_amax, amax + b, (n - b) * sizeof(float));
  step(last_amax, last_scales, last_multipliers);
  std::memcpy(scales + b, last_scales, n - b);
  std::memcpy(multipliers + b, last_multipliers, (n - b) * sizeof(float));
}

void nv_scales(const float* amax, size_t n, const NvConstants& constants, uint8_t* scales, float* multipliers) {
  for_blocks(amax, n, scales, multipliers,
             [&constants](const float* from, uint8_t* stored, float* multiplier) HWY_ATTR {
               const VF most = hn::Set(DF(), kLargestF32);
               const VF scaled = hn::Min(hn::Mul(hn::LoadU(DF(), from), hn::Set(DF(), constants.encode_sixth)), most);
               const V code = encode<E4M3>(hn::BitCast(D(), scaled));
               const VF scale = hn::Mul(hn::BitCast(DF(), decode<E4M3>(code)), hn::Set(DF(), constants.decode));
               hn::StoreU(hn::Min(hn::Div(hn::Set(DF(), 1.0F), scale), most), DF(), multiplier);
               hn::StoreU(hn::DemoteTo(DBytes(), code), DBytes(), stored);
             });
}

void mx_scales(const float* amax, size_t n, float reciprocal, uint8_t* scales, float* multipliers) {
  for_blocks(
      amax, n, scales, multipliers, [reciprocal](const float* from, uint8_t* stored, float* multiplier) HWY_ATTR {
        const V value = hn::BitCast(D(), hn::Mul(hn::LoadU(DF(), from), hn::Set(DF(), reciprocal)));
        // Rounds up if a bit below the exponent is set, except for subnormals of at most half of the smallest normal.
        const V threshold = where(hn::Lt(value, bits(0x00800000)), bits(0x00400000), hn::Zero(D()));
        const V up = hn::VecFromMask(D(), hn::Gt(hn::And(value, bits(0x7FFFFF)), threshold));
        const V finite = hn::Min(hn::Sub(hn::ShiftRight<23>(value), up), bits(254));
        const V exponent = where(is_nan(value), bits(255), finite);
        const V ordinary = hn::ShiftLeft<23>(hn::Sub(bits(254), exponent));
        const V large = where(hn::Eq(exponent, bits(255)), bits(kNaNF32), bits(0x00400000));
        hn::StoreU(where(hn::Gt(exponent, bits(253)), large, ordinary), D(), reinterpret_cast<int32_t*>(multiplier));
        hn::StoreU(hn::DemoteTo(DBytes(), exponent), DBytes(), stored);
      });
}

const ScaleKernels& scale_kernels() {
  static const ScaleKernels kernels{.target = hwy::TargetName(HWY_TARGET), .nv = nv_scales, .mx = mx_scales};
  return kernels;
}

#else
const ScaleKernels& scale_kernels() {
  return scalar_scale();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(scale_kernels);
const ScaleKernels& simd_scale(int64_t target) {
  return TESSERA_CALL_TARGET(scale_kernels, target);
}

}  // namespace tessera::codec
#endif
