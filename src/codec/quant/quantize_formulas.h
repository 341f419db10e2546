// Scales of quantised formats, one block at a time, by the formulas of docs/formats/quantized.md. Single precision,
// rounded to nearest even after every operation, in the order written; no contraction.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "codec/float/float_bits.h"

namespace tessera::codec {

inline constexpr float kLargestF32 = std::numeric_limits<float>::max();
inline constexpr float kLargestE4M3 = 448;
inline constexpr float kLargestE5M2 = 57344;
inline constexpr float kLargestE2M1 = 6;
inline constexpr float kNvLargest = kLargestE4M3 * kLargestE2M1;  // 2688

// A block's scale as stored, and the multiplier of its elements before they are encoded.
template <typename Stored>
struct Scale {
  Stored stored;
  float multiplier;
};

// NVFP4: from the tensor's amax. Its formulas stay within f32's normal numbers between these limits
// (docs/formats/quantized.md).
inline constexpr float kLeastNvAmax = 7.9e-36F;
inline constexpr float kMostNvAmax = 7.5e35F;

struct NvConstants {
  float encode_sixth;  // S_enc * (1/6)
  float decode;        // S_dec
};

inline NvConstants nv_constants(float amax) {
  float encode = std::min(kNvLargest / amax, kLargestF32);
  if (amax == 0 || encode == 0) encode = 1;
  return {encode * (1.0F / 6.0F), 1.0F / encode};
}

inline Scale<uint8_t> nv_scale(float block_amax, const NvConstants& constants) {
  const uint8_t stored = e4m3_from_f32(std::min(block_amax * constants.encode_sixth, kLargestF32));
  return {stored, std::min(1.0F / (f32_from_e4m3(stored) * constants.decode), kLargestF32)};
}

inline float nv_dequantizer(float scale, float amax) {
  return (scale * amax) * (1.0F / kNvLargest);
}

// MXFP8. OCP Microscaling 1.0 rounds down; hardware and TransformerEngine round up, so that nothing saturates.
constexpr uint8_t e8m0_round_up(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (bits > kInfF32) return 255;
  if (bits == kInfF32) return 254;
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7FFFFF;
  const bool up = mantissa > 0 && exponent != 254 && !(exponent == 0 && mantissa <= 0x400000);
  return static_cast<uint8_t>(exponent + (up ? 1 : 0));
}

// 2^(127 - e).
constexpr float mx_multiplier(uint8_t scale) {
  if (scale == 255) return std::bit_cast<float>(kNaNF32);
  return std::bit_cast<float>(scale == 254 ? 0x00400000U : (254U - scale) << 23);
}

// `reciprocal`: 1 / the format's largest value, rounded.
constexpr Scale<uint8_t> mx_scale(float block_amax, float reciprocal) {
  const uint8_t stored = e8m0_round_up(block_amax * reciprocal);
  return {stored, mx_multiplier(stored)};
}

// FP8, for a tensor or a block.
struct Fp8Constants {
  float largest;      // of the format, times 2^-margin
  float eps;          // smaller amaxes are replaced by this
  float overflow;     // replaces a scale that overflows
  bool power_of_two;  // round the scale down to a power of two
};

inline Scale<float> fp8_scale(float amax, const Fp8Constants& constants) {
  if (amax < constants.eps) amax = constants.eps;
  if (amax == 0 || !(std::fabs(amax) <= kLargestF32)) return {1, 1};
  float scale = constants.largest / amax;
  if (scale > kLargestF32) scale = constants.overflow;
  if (constants.power_of_two) scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xFF800000);
  return {1.0F / scale, scale};
}

// Stochastic rounding of y, |y| <= 6, to E2M1: up with a probability of random/256 to the next value.
inline uint8_t e2m1_stochastic(float y, uint8_t random) {
  if (y != y) return kNaNE2M1;
  const auto step = [](float a) { return a >= 4 ? 2.0F : a >= 2 ? 1.0F : 0.5F; };
  const float a = std::fabs(y);
  // The product is exact, so this is the fused multiply-add of the formula.
  const float t = static_cast<float>(random) * (1.0F / 256.0F) * step(a) + a;
  const float q = std::min(std::floor(t / step(t)) * step(t), kLargestE2M1);
  return e2m1_from_f32(std::copysign(q, y));
}

}  // namespace tessera::codec
