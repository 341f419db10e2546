// The types of codec/float_types.h a vector at a time: Lane<T>::load gives Lanes(D()) elements as the bits of f32,
// Lane<T>::store takes them. NaNs are made canonical by the stores alone. Included once a Highway target.
#include <hwy/highway.h>

#include <cstddef>

#include "codec/float_types.h"
#include "codec/simd_target.h"

#if defined(TESSERA_CODEC_FLOAT_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CODEC_FLOAT_VEC_INL_H_
#undef TESSERA_CODEC_FLOAT_VEC_INL_H_
#else
#define TESSERA_CODEC_FLOAT_VEC_INL_H_
#endif

#if TESSERA_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<int32_t>;  // bits of f32; signed, since comparisons of signed lanes are what all targets have
using DF = hn::RebindToFloat<D>;
using D64 = hn::RepartitionToWide<DF>;
using V = hn::Vec<D>;

template <typename T>
HWY_INLINE T* at(std::byte* p) {
  return reinterpret_cast<T*>(p);
}
template <typename T>
HWY_INLINE const T* at(const std::byte* p) {
  return reinterpret_cast<const T*>(p);
}

HWY_INLINE V bits(uint32_t value) {
  return hn::Set(D(), static_cast<int32_t>(value));
}
HWY_INLINE V magnitude_of(V value) {
  return hn::And(value, bits(0x7FFFFFFF));
}
HWY_INLINE V where(hn::Mask<D> mask, V yes, V no) {
  return hn::IfThenElse(mask, yes, no);
}
HWY_INLINE hn::Mask<D> is_nan(V value) {
  return hn::Gt(magnitude_of(value), bits(kInfF32));
}

// value >> kBits, rounded to nearest even. REQUIRES: the sum does not pass 2^31.
template <int kBits>
HWY_INLINE V shift_right_rne(V value) {
  const V odd = hn::And(hn::ShiftRight<kBits>(value), bits(1));
  return hn::ShiftRight<kBits>(hn::Add(value, hn::Add(odd, bits((1U << (kBits - 1)) - 1))));
}

// tessera::encode and tessera::decode, both branches taken.
template <typename T>
HWY_INLINE V encode(V value) {
  constexpr MiniFloat kF = T::kFormat;
  const V magnitude = magnitude_of(value);
  const V normal = shift_right_rne<kF.shift()>(hn::Sub(magnitude, bits(kF.rebias())));
  // Adding a number whose last place is the format's smallest subnormal makes the adder round.
  const auto anchor = hn::Set(DF(), power_of_two(kF.smallest_exponent() + 23));
  const auto anchored = hn::Add(hn::BitCast(DF(), magnitude), anchor);
  const V subnormal = hn::Sub(hn::BitCast(D(), anchored), hn::BitCast(D(), anchor));
  const V code = where(hn::Lt(magnitude, bits(kF.rebias() + (1U << 23))), subnormal, normal);
  const V sign = hn::And(hn::ShiftRight<31 - kF.exponent_bits - kF.mantissa_bits>(value), bits(kF.sign()));
  const V finite = hn::Or(hn::Min(code, bits(kF.largest)), sign);
  return where(is_nan(value), bits(kF.nan), finite);
}

template <typename T>
HWY_INLINE V decode(V code) {
  constexpr MiniFloat kF = T::kFormat;
  const V magnitude = hn::And(code, bits(kF.sign() - 1));
  const V sign = hn::ShiftLeft<31 - kF.exponent_bits - kF.mantissa_bits>(hn::And(code, bits(kF.sign())));
  V normal = hn::Add(hn::ShiftLeft<kF.shift()>(magnitude), bits(kF.rebias()));
  if constexpr (kF.has_infinity) {  // the all-ones exponent must become all ones again
    normal =
        hn::Add(normal, hn::And(bits(kF.rebias()), hn::VecFromMask(D(), hn::Gt(magnitude, bits(kF.infinity() - 1)))));
  } else {
    normal = where(hn::Eq(magnitude, bits(kF.nan)), bits(kNaNF32), normal);
  }
  const auto unit = hn::Set(DF(), power_of_two(kF.smallest_exponent()));
  const V subnormal = hn::BitCast(D(), hn::Mul(hn::ConvertTo(DF(), magnitude), unit));
  return hn::Or(sign, where(hn::Lt(magnitude, bits(1U << kF.mantissa_bits)), subnormal, normal));
}

// Of the types with a kFormat.
template <typename T>
struct Lane {
  using DBits = hn::Rebind<typename T::Bits, D>;
  static HWY_INLINE V load(const std::byte* p) {
    return decode<T>(hn::PromoteTo(D(), hn::LoadU(DBits(), at<typename T::Bits>(p))));
  }
  static HWY_INLINE void store(V value, std::byte* p) {
    hn::StoreU(hn::DemoteTo(DBits(), encode<T>(value)), DBits(), at<typename T::Bits>(p));
  }
};

#if TESSERA_F16_INSTRUCTIONS
template <>
struct Lane<F16> {
  using DHalf = hn::Rebind<hwy::float16_t, D>;
  using DBits = hn::Rebind<uint16_t, D>;
  static HWY_INLINE V load(const std::byte* p) {
    const auto half = hn::BitCast(DHalf(), hn::LoadU(DBits(), at<uint16_t>(p)));
    return hn::BitCast(D(), hn::PromoteTo(DF(), half));
  }
  static HWY_INLINE void store(V value, std::byte* p) {
    const V canonical = where(is_nan(value), bits(kNaNF32), value);
    const auto half = hn::DemoteTo(DHalf(), hn::BitCast(DF(), canonical));
    hn::StoreU(hn::BitCast(DBits(), half), DBits(), at<uint16_t>(p));
  }
};
#endif

template <>
struct Lane<BF16> {
  using DBits = hn::Rebind<uint16_t, D>;
  static HWY_INLINE V load(const std::byte* p) {
    return hn::ShiftLeft<16>(hn::PromoteTo(D(), hn::LoadU(DBits(), at<uint16_t>(p))));
  }
  static HWY_INLINE void store(V value, std::byte* p) {
    const V rounded = hn::And(shift_right_rne<16>(value), bits(0xFFFF));
    hn::StoreU(hn::DemoteTo(DBits(), where(is_nan(value), bits(kNaNBF16), rounded)), DBits(), at<uint16_t>(p));
  }
};

template <>
struct Lane<F32> {
  static HWY_INLINE V load(const std::byte* p) { return hn::LoadU(D(), at<int32_t>(p)); }
  static HWY_INLINE void store(V value, std::byte* p) {
    hn::StoreU(where(is_nan(value), bits(kNaNF32), value), D(), at<int32_t>(p));
  }
};

template <>
struct Lane<F64> {
  using DHalf = hn::Half<DF>;
  static HWY_INLINE V load(const std::byte* p) {
    const auto low = hn::DemoteTo(DHalf(), hn::LoadU(D64(), at<double>(p)));
    const auto high = hn::DemoteTo(DHalf(), hn::LoadU(D64(), at<double>(p) + hn::Lanes(D64())));
    return hn::BitCast(D(), hn::Combine(DF(), high, low));
  }
  static HWY_INLINE void store(V value, std::byte* p) {
    const auto f32 = hn::BitCast(DF(), where(is_nan(value), bits(kNaNF32), value));
    hn::StoreU(hn::PromoteTo(D64(), hn::LowerHalf(DHalf(), f32)), D64(), at<double>(p));
    hn::StoreU(hn::PromoteTo(D64(), hn::UpperHalf(DHalf(), f32)), D64(), at<double>(p) + hn::Lanes(D64()));
  }
};

}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // TESSERA_SIMD_TARGET

#endif  // include guard
