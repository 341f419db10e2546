// Conversions between f32 and other float formats, one value at a time, by bit arithmetic: the reference for every
// faster variant. Formats: IEEE 754, OCP 8-bit Floating Point 1.0, OCP Microscaling Formats 1.0.
//
// Rounding is to nearest, ties to even. Infinity stays infinity in f16 and bf16; in E4M3 and E5M2 it saturates to the
// largest finite value, like all values that are too large. The sign of zero is kept. Every NaN, in either direction,
// becomes its format's positive quiet NaN below. f64 is rounded to f32 first. Pure; all functions except the f64 pair
// are constexpr and use no float arithmetic that could round.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera {

inline constexpr uint64_t kNaNF64 = 0x7FF8000000000000;
inline constexpr uint32_t kNaNF32 = 0x7FC00000;
inline constexpr uint16_t kNaNF16 = 0x7E00;
inline constexpr uint16_t kNaNBF16 = 0x7FC0;
inline constexpr uint8_t kNaNF8 = 0x7F;  // E4M3 and E5M2
inline constexpr uint8_t kNaNE2M1 = 7;   // E2M1 has no NaN: this is 6
inline constexpr uint32_t kInfF32 = 0x7F800000;

// A format of at most 16 bits: sign, exponent, mantissa. Codes below are without the sign.
struct MiniFloat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // otherwise the all-ones exponent holds numbers, and only all ones is NaN
  uint32_t largest;   // the code of values too large for the format
  uint32_t nan;

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr uint32_t sign() const { return 1U << (exponent_bits + mantissa_bits); }
  constexpr uint32_t infinity() const { return sign() - (1U << mantissa_bits); }
  // To an f32's bits: mantissas differ by shift(), exponent biases by rebias().
  constexpr int shift() const { return 23 - mantissa_bits; }
  constexpr uint32_t rebias() const { return static_cast<uint32_t>(127 - bias()) << 23; }
  // The smallest subnormal is 2^this.
  constexpr int smallest_exponent() const { return 1 - bias() - mantissa_bits; }
};
inline constexpr MiniFloat kF16Format{5, 10, true, 0x7C00, kNaNF16};
inline constexpr MiniFloat kE5M2Format{5, 2, true, 0x7B, kNaNF8};
inline constexpr MiniFloat kE4M3Format{4, 3, false, 0x7E, kNaNF8};

// 2^exponent. REQUIRES: -126 <= exponent <= 127.
constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// `value` / 2^bits, rounded to nearest even. REQUIRES: 1 <= bits <= 31 and value < 2^31.
constexpr uint32_t shift_right_rne(uint32_t value, int bits) {
  return (value + (1U << (bits - 1)) - 1 + ((value >> bits) & 1)) >> bits;
}

constexpr uint32_t encode(const MiniFloat& format, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > kInfF32) return format.nan;
  uint32_t code = 0;
  if (magnitude >= format.rebias() + (1U << 23)) {  // a carry out of the mantissa correctly increments the exponent
    code = shift_right_rne(magnitude - format.rebias(), format.shift());
  } else {  // below the smallest normal: shift the mantissa with its leading one to the fixed exponent
    const int exponent = static_cast<int>(magnitude >> 23);
    const int dropped = format.shift() + 128 - format.bias() - exponent;
    if (exponent > 0 && dropped <= 24) code = shift_right_rne((magnitude & 0x7FFFFF) | 0x800000, dropped);
  }
  return (bits >> 31) * format.sign() | (code < format.largest ? code : format.largest);
}

constexpr float decode(const MiniFloat& format, uint32_t code) {
  const uint32_t sign = (code & format.sign()) != 0 ? 0x80000000 : 0;
  const uint32_t magnitude = code & (format.sign() - 1);
  if (format.has_infinity ? magnitude > format.infinity() : magnitude == format.nan)
    return std::bit_cast<float>(kNaNF32);
  uint32_t bits = (magnitude << format.shift()) + format.rebias();
  if (format.has_infinity && magnitude == format.infinity()) {
    bits = kInfF32;
  } else if (magnitude >> format.mantissa_bits == 0) {
    bits = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * power_of_two(format.smallest_exponent()));
  }
  return std::bit_cast<float>(sign | bits);
}

constexpr uint16_t f16_from_f32(float value) {
  return static_cast<uint16_t>(encode(kF16Format, value));
}
constexpr float f32_from_f16(uint16_t code) {
  return decode(kF16Format, code);
}

constexpr uint8_t e4m3_from_f32(float value) {
  return static_cast<uint8_t>(encode(kE4M3Format, value));
}
constexpr float f32_from_e4m3(uint8_t code) {
  return decode(kE4M3Format, code);
}

constexpr uint8_t e5m2_from_f32(float value) {
  return static_cast<uint8_t>(encode(kE5M2Format, value));
}
constexpr float f32_from_e5m2(uint8_t code) {
  return decode(kE5M2Format, code);
}

constexpr uint16_t bf16_from_f32(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > kInfF32) return kNaNBF16;
  return static_cast<uint16_t>(bits >> 16 & 0x8000) | static_cast<uint16_t>(shift_right_rne(bits & 0x7FFFFFFF, 16));
}
constexpr float f32_from_bf16(uint16_t code) {
  const uint32_t bits = uint32_t{code} << 16;
  return std::bit_cast<float>((bits & 0x7FFFFFFF) > kInfF32 ? kNaNF32 : bits);
}

// E8M0: 2^(code - 127), 255 is NaN.
constexpr float f32_from_e8m0(uint8_t code) {
  if (code == 255) return std::bit_cast<float>(kNaNF32);
  return std::bit_cast<float>(code == 0 ? 0x00400000U : uint32_t{code} << 23);
}

// E2M1, in the low four bits of `code`. Saturates; NaN becomes 7, which is 6, as the hardware does.
inline constexpr MiniFloat kE2M1Format{2, 1, false, 7, kNaNE2M1};  // for encoding only: 7 does not decode to NaN
constexpr uint8_t e2m1_from_f32(float value) {
  return static_cast<uint8_t>(encode(kE2M1Format, value));
}
constexpr float f32_from_e2m1(uint8_t code) {
  constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// These two round in the current mode, by default to nearest even.
inline float f32_from_f64(double value) {
  return value != value ? std::bit_cast<float>(kNaNF32) : static_cast<float>(value);
}
inline double f64_from_f32(float value) {
  return value != value ? std::bit_cast<double>(kNaNF64) : static_cast<double>(value);
}

}  // namespace tessera
