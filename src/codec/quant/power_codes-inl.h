// Multiplies bf16 by powers of two and encodes to E4M3 and E5M2, in 16-bit lanes: such a product has the element's
// mantissa, so rounding it is rounding the element, and the power is added to the exponent. This holds only for normal
// codes; subnormal, saturated and non-finite ones are detected on the way and left to the caller. Included once for
// each Highway target.
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/float/float_types.h"
#include "codec/simd/simd_target.h"

#if defined(TESSERA_CODEC_POWER_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CODEC_POWER_CODES_INL_H_
#undef TESSERA_CODEC_POWER_CODES_INL_H_
#else
#define TESSERA_CODEC_POWER_CODES_INL_H_
#endif

#include "codec/float/float_vec-inl.h"

#if TESSERA_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {

template <typename Code>
struct PowerCodes {
  static constexpr MiniFloat kF = Code::kFormat;
  static constexpr int kBF16Mantissa = 7;  // bits
  static constexpr int kShift = kBF16Mantissa - kF.mantissa_bits;
  // The smallest and the largest normal code, before they are shifted down.
  static constexpr uint32_t kLeast = 1U << kBF16Mantissa;
  static constexpr uint32_t kMost = (kF.largest << kShift) + (1U << kShift) - 1;
  // A multiplier 2^(e - 127) lowers an element's bits by the offset (kBase - e) << kBF16Mantissa.
  static constexpr int32_t kBase = 2 * 127 - kF.bias();
  // The e between which offsets are positive, and infinity and NaN end up above kMost.
  static constexpr int32_t kGreatest = kBase;
  static constexpr int32_t kSmallest = kBase - static_cast<int32_t>((0x7F80 - kMost) >> kBF16Mantissa);
  static constexpr uint32_t kNone = 0x7FFF;  // the offset of all others, with which only zeros can be encoded

  // Writes less than a vector of 32-bit lanes beyond out[n]. False if a multiplier is NaN or infinite.
  static HWY_INLINE bool offsets(const float* multipliers, size_t n, uint16_t* out) {
    const hn::Rebind<uint16_t, D> halves;
    const size_t lanes = hn::Lanes(D());
    V most = hn::Zero(D());
    const auto step = [&](const float* from, uint16_t* to) HWY_ATTR {
      const V exponent = hn::ShiftRight<23>(hn::BitCast(D(), hn::LoadU(DF(), from)));
      most = hn::Max(most, exponent);
      const V clamped = hn::Min(hn::Max(exponent, bits(kSmallest)), bits(kGreatest));
      const V offset = hn::ShiftLeft<kBF16Mantissa>(hn::Sub(bits(kBase), exponent));
      hn::StoreU(hn::DemoteTo(halves, where(hn::Eq(clamped, exponent), offset, bits(kNone))), halves, to);
    };
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) step(multipliers + i, out + i);
    if (i < n) {
      HWY_ALIGN float last[hn::MaxLanes(D())] = {};
      std::memcpy(last, multipliers + i, (n - i) * sizeof(float));
      step(last, out + i);
    }
    return hn::AllFalse(D(), hn::Gt(most, bits(254)));
  }

  // Codes in 16-bit lanes. `left` marks lanes that have no valid code because it is subnormal, saturates or is not
  // finite.
  static HWY_INLINE V16 encode(V16 element, V16 offset, Mask16& left) {
    const V16 magnitude = hn::And(element, words(0x7FFF));
    const V16 odd = hn::And(hn::ShiftRight<kShift>(magnitude), words(1));
    const V16 up = hn::Add(hn::Add(magnitude, words((1U << (kShift - 1)) - 1)), odd);
    const V16 rounded = hn::SaturatedSub(up, offset);
    // Shifted so that kLeast is the smallest signed number and everything out of bounds is above kMost.
    const Mask16 out = greater(hn::Sub(rounded, words(kLeast + 0x8000)), words(kMost - kLeast + 0x8000));
    left = hn::And(out, hn::Ne(hn::BitCast(D16S(), magnitude), hn::Zero(D16S())));
    return hn::OrAnd(hn::ShiftRight<kShift>(rounded), hn::ShiftRight<8>(element), words(kF.sign()));
  }
};

}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TESSERA_SIMD_TARGET

#endif  // include guard
