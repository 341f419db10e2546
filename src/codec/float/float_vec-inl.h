// The types of codec/float/float_types.h, one vector at a time: Lane<T>::load reads Lanes(D()) elements as f32 bits,
// Lane<T>::store writes them. Only stores make NaNs canonical. Included once for each Highway target.
#include <hwy/highway.h>

#include <cstddef>
#include <type_traits>

#include "codec/float/float_types.h"
#include "codec/simd/simd_target.h"

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

using D = hn::ScalableTag<int32_t>;  // f32 bits; signed, since all targets can compare signed lanes
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

using D16 = hn::ScalableTag<uint16_t>;
using V16 = hn::Vec<D16>;
using D16S = hn::RebindToSigned<D16>;
using Mask16 = hn::Mask<D16S>;

HWY_INLINE V16 words(uint32_t value) {
  return hn::Set(D16(), static_cast<uint16_t>(value));
}
HWY_INLINE Mask16 greater(V16 a, V16 b) {  // as signed numbers
  return hn::Gt(hn::BitCast(D16S(), a), hn::BitCast(D16S(), b));
}

// value >> kBits, rounded to nearest even. REQUIRES: the sum does not exceed 2^31.
template <int kBits>
HWY_INLINE V shift_right_rne(V value) {
  const V odd = hn::And(hn::ShiftRight<kBits>(value), bits(1));
  return hn::ShiftRight<kBits>(hn::Add(value, hn::Add(odd, bits((1U << (kBits - 1)) - 1))));
}

// tessera::encode and tessera::decode; both branches are computed.
template <typename T>
HWY_INLINE V encode(V value) {
  constexpr MiniFloat kF = T::kFormat;
  const V magnitude = magnitude_of(value);
  const V normal = shift_right_rne<kF.shift()>(hn::Sub(magnitude, bits(kF.rebias())));
  // Adding a number whose last place is the format's smallest subnormal makes the FPU round.
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
  if constexpr (kF.has_infinity) {  // the all-ones exponent must stay all ones
    normal =
        hn::Add(normal, hn::And(bits(kF.rebias()), hn::VecFromMask(D(), hn::Gt(magnitude, bits(kF.infinity() - 1)))));
  } else {
    normal = where(hn::Eq(magnitude, bits(kF.nan)), bits(kNaNF32), normal);
  }
  const auto unit = hn::Set(DF(), power_of_two(kF.smallest_exponent()));
  const V subnormal = hn::BitCast(D(), hn::Mul(hn::ConvertTo(DF(), magnitude), unit));
  return hn::Or(sign, where(hn::Lt(magnitude, bits(1U << kF.mantissa_bits)), subnormal, normal));
}

// Codes in the low bits of the lanes.
template <typename T>
HWY_INLINE V decode_lanes(V codes) {
  if constexpr (std::is_same_v<T, BF16>) {
    return hn::ShiftLeft<16>(codes);
  } else {
    return decode<T>(codes);
  }
}

// For types with a kFormat.
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

// Types whose values have no more significant bits.
template <typename T>
inline constexpr bool kHasEightBits = std::is_same_v<T, BF16> || std::is_same_v<T, E4M3> || std::is_same_v<T, E5M2>;

// Codes that are packed two in a byte.
template <typename Code>
inline constexpr bool kPackedPairs = std::is_same_v<Code, E2M1>;
template <typename Code>
constexpr size_t code_bytes(size_t n) {
  return kPackedPairs<Code> ? (n + 1) / 2 : n;
}

#if TESSERA_F16_INSTRUCTIONS
// encode() of two vectors of products or elements at once, to 16-bit lanes: f16 instructions handle values below the
// smallest normal. An f16 with the format's exponents is rounded to the format's mantissa. Before that, each value is
// rounded to odd at eight bits, which keeps what the second rounding needs. `kExact`: the values have at most eight
// bits.
//
// The extra 2^-13 in the power of two is for E4M3's only tie below f16's smallest step: eight bits just above it must
// not fall on it. No other result changes.
template <typename Code>
inline constexpr float kToF16 =
    power_of_two(Code::kFormat.bias() - kF16Format.bias()) * (std::is_same_v<Code, E4M3> ? 1 + power_of_two(-13) : 1);

template <bool kExact>
HWY_INLINE V to_eight_bits(V value) {
  if constexpr (kExact) return value;
  // Any bit below the eight carries into the last one, which is set, not added to.
  const V carry = hn::Add(hn::And(value, bits(0xFFFF)), bits(0xFFFF));
  return hn::And(hn::Or(value, carry), bits(0xFFFF0000));
}

using DHalves = hn::Repartition<int16_t, D>;
template <typename Code, bool kExact>
HWY_INLINE hn::Vec<DHalves> encode_two(V low, V high) {
  constexpr MiniFloat kF = Code::kFormat;
  constexpr int kShift = kF16Format.mantissa_bits - kF.mantissa_bits;
  const hn::Rebind<hwy::float16_t, D> half;
  const auto halves = [&](V value) HWY_ATTR {
    auto scaled = hn::BitCast(DF(), to_eight_bits<kExact>(value));
    if constexpr (kToF16<Code> != 1) scaled = hn::Mul(scaled, hn::Set(DF(), kToF16<Code>));
    return hn::BitCast(hn::Rebind<int16_t, D>(), hn::DemoteTo(half, scaled));
  };
  const DHalves d;
  const auto word = [&](uint32_t value) HWY_ATTR { return hn::Set(d, static_cast<int16_t>(value)); };
  const auto h = hn::Combine(d, halves(high), halves(low));
  const auto magnitude = hn::And(h, word(0x7FFF));
  const auto tie = hn::And(hn::ShiftRight<kShift>(magnitude), word(1));
  const auto up = hn::Add(hn::Add(magnitude, word((1U << (kShift - 1)) - 1)), tie);
  // Infinity and the largest NaN stay below 2^15 after the addition; as unsigned numbers, since NaN may exceed it.
  const hn::RebindToUnsigned<DHalves> u;
  const auto code = hn::BitCast(d, hn::ShiftRight<kShift>(hn::BitCast(u, up)));
  const auto sign = hn::And(hn::BitCast(d, hn::ShiftRight<15 - kF.exponent_bits - kF.mantissa_bits>(hn::BitCast(u, h))),
                            word(kF.sign()));
  const auto finite = hn::Or(hn::Min(code, word(kF.largest)), sign);
  return hn::IfThenElse(hn::Gt(magnitude, word(kF16Format.infinity())), word(kF.nan), finite);
}

// Codes of two vectors in order, packed if the format is.
template <typename Code, bool kExact>
HWY_INLINE void store_two(V low, V high, std::byte* p) {
  const auto codes = encode_two<Code, kExact>(low, high);
  if constexpr (kPackedPairs<Code>) {
    const hn::RebindToUnsigned<D> pairs;
    const hn::Rebind<uint8_t, D> bytes;
    const auto both = hn::BitCast(pairs, codes);  // moves the odd code, 16 bits up, down beside the even one
    hn::StoreU(hn::TruncateTo(bytes, hn::Or(both, hn::ShiftRight<12>(both))), bytes, at<uint8_t>(p));
  } else {
    const hn::Rebind<uint8_t, DHalves> bytes;
    hn::StoreU(hn::TruncateTo(bytes, hn::BitCast(hn::RebindToUnsigned<DHalves>(), codes)), bytes, at<uint8_t>(p));
  }
}
#else
template <typename Code, bool kExact>
HWY_INLINE void store_two(V low, V high, std::byte* p) {
  const size_t lanes = hn::Lanes(D());
  if constexpr (kPackedPairs<Code>) {
    using DPairs = hn::RepartitionToWide<hn::RebindToUnsigned<D> >;
    const hn::Rebind<uint8_t, DPairs> bytes;
    const auto store = [&](V codes, std::byte* to) HWY_ATTR {
      const auto pairs = hn::BitCast(DPairs(), codes);  // moves the odd code, 32 bits up, down beside the even one
      hn::StoreU(hn::TruncateTo(bytes, hn::Or(pairs, hn::ShiftRight<28>(pairs))), bytes, at<uint8_t>(to));
    };
    store(encode<Code>(low), p);
    store(encode<Code>(high), p + lanes / 2);
  } else {
    Lane<Code>::store(low, p);
    Lane<Code>::store(high, p + lanes);
  }
}
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
