// For tests: single elements of quantised formats, implemented independently of the code under test: by table search,
// by the next power of two, by Philox numbers.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

#include "codec/float/float_oracle.h"
#include "tessera/quantize.h"

namespace tessera::oracle {

inline constexpr float kMagnitudes[8] = {0, .5F, 1, 1.5F, 2, 3, 4, 6};  // E2M1

// Half-way between two codes: rounds to the even one.
struct HalfWay {
  float magnitude;
  bool up;
};
inline constexpr HalfWay kHalfWays[7] = {{.25F, false}, {.75F, true}, {1.25F, false}, {1.75F, true},
                                         {2.5F, false}, {3.5F, true}, {5, false}};

inline uint8_t e2m1(float x) {
  if (std::isnan(x)) return 7;
  const float a = std::fabs(x);
  unsigned code = std::signbit(x) ? 8 : 0;
  for (const HalfWay& half_way : kHalfWays)
    code += (a > half_way.magnitude ? 1U : 0U) + (half_way.up && a == half_way.magnitude ? 1U : 0U);
  return static_cast<uint8_t>(code);
}
inline float e2m1_value(uint8_t code) {
  return code >= 8 ? -kMagnitudes[code - 8] : kMagnitudes[code];
}

// The smallest power of two that is at least v: code e is 2^(e - 127), 255 is NaN.
inline uint8_t e8m0(float v) {
  if (std::isnan(v)) return 255;
  uint8_t e = 0;
  for (double power = std::ldexp(1.0, -127); e < 254 && power < double{v}; power *= 2) ++e;
  return e;
}
inline float e8m0_value(uint8_t e) {
  return e == 255 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(std::ldexp(1.0, e - 127));
}
// The same for all codes, except that 254's inverse is not a normal f32 number.
inline float e8m0_inverse(uint8_t e) {
  return e == 255 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(std::ldexp(1.0, 127 - e));
}

inline bool is_e5m2(Format format) {
  return format == Format::kFp8E5M2 || format == Format::kMxfp8E5M2;
}
inline const FloatOracle& fp8(Format format) {
  return is_e5m2(format) ? e5m2_oracle() : e4m3_oracle();
}
inline float largest_fp8(Format format) {
  return is_e5m2(format) ? 57344.0F : 448.0F;
}
inline float largest_of(DType dtype) {
  if (dtype == DType::kF32) return FLT_MAX;
  return static_cast<float>((dtype == DType::kF16 ? f16_oracle() : bf16_oracle()).values().back());
}

// Philox4x32-10 (Salmon et al., SC '11).

using Words4 = std::array<uint32_t, 4>;

inline Words4 philox(Words4 c, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 / 4294967296) ^ c[1] ^ key[0], static_cast<uint32_t>(p1 % 4294967296),
         static_cast<uint32_t>(p0 / 4294967296) ^ c[3] ^ key[1], static_cast<uint32_t>(p0 % 4294967296)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return c;
}

inline uint32_t draw(uint64_t seed, Plane plane, uint64_t g) {
  const uint64_t block = g / 16;
  const Words4 words = philox({static_cast<uint32_t>(block % 4294967296), static_cast<uint32_t>(block / 4294967296),
                               plane == Plane::kRow ? 0U : 1U, 0U},
                              {static_cast<uint32_t>(seed % 4294967296), static_cast<uint32_t>(seed / 4294967296)});
  const uint64_t byte = g % 16;
  uint32_t word = words[byte / 4];
  for (uint64_t i = 0; i < byte % 4; ++i) word /= 256;
  return word % 256;
}

inline float e2m1_step(float a) {
  if (a >= 4) return 2;
  return a >= 2 ? 1 : .5F;
}

// `r` is 0 to 255.
inline uint8_t e2m1_stochastic(float y, uint32_t r) {
  if (std::isnan(y)) return 7;
  const float a = std::min(std::fabs(y), 6.0F);
  const float t = std::fma(static_cast<float>(r) / 256.0F, e2m1_step(a), a);
  const float q = std::min(std::floor(t / e2m1_step(t)) * e2m1_step(t), 6.0F);
  const uint8_t code = e2m1(q);
  return std::signbit(y) ? code + 8 : code;
}

}  // namespace tessera::oracle
