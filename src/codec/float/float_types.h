// The float types that casts support, as C++ types: their bits, and conversions of one value to f32 and back
// (codec/float/float_bits.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "codec/float/float_bits.h"

namespace tessera::codec {

struct F64 {
  using Bits = uint64_t;
  static float decode(Bits code) { return f32_from_f64(std::bit_cast<double>(code)); }
  static Bits encode(float value) { return std::bit_cast<Bits>(f64_from_f32(value)); }
};

struct F32 {
  using Bits = uint32_t;
  static constexpr float decode(Bits code) { return std::bit_cast<float>(code); }
  static constexpr Bits encode(float value) { return value != value ? kNaNF32 : std::bit_cast<Bits>(value); }
};

struct F16 {
  using Bits = uint16_t;
  static constexpr MiniFloat kFormat = kF16Format;
  static constexpr float decode(Bits code) { return f32_from_f16(code); }
  static constexpr Bits encode(float value) { return f16_from_f32(value); }
};

struct BF16 {
  using Bits = uint16_t;
  static constexpr float decode(Bits code) { return f32_from_bf16(code); }
  static constexpr Bits encode(float value) { return bf16_from_f32(value); }
};

struct E4M3 {
  using Bits = uint8_t;
  static constexpr MiniFloat kFormat = kE4M3Format;
  static constexpr float decode(Bits code) { return f32_from_e4m3(code); }
  static constexpr Bits encode(float value) { return e4m3_from_f32(value); }
};

struct E5M2 {
  using Bits = uint8_t;
  static constexpr MiniFloat kFormat = kE5M2Format;
  static constexpr float decode(Bits code) { return f32_from_e5m2(code); }
  static constexpr Bits encode(float value) { return e5m2_from_f32(value); }
};

// Codes of quantised formats; two E2M1 codes are packed in a byte.
struct E2M1 {
  static constexpr MiniFloat kFormat = kE2M1Format;
  static constexpr float decode(uint8_t code) { return f32_from_e2m1(code); }
  static constexpr uint8_t encode(float value) { return e2m1_from_f32(value); }
};

template <typename... T>
struct TypeList {};
using CastTypes = TypeList<F64, F32, F16, BF16, E4M3, E5M2>;  // in the order of DType
using QuantizedTypes = TypeList<F32, F16, BF16>;              // inputs of quantisation, in the order of DType
using CodeTypes = TypeList<E4M3, E5M2, E2M1>;                 // its outputs
template <typename T>                                         // index in QuantizedTypes
inline constexpr size_t kIndexOf = std::is_same_v<T, F32>   ? 0
                                   : std::is_same_v<T, F16> ? 1
                                                            : 2;
using ReducedTypes = TypeList<F64, F32, F16, BF16>;
using FoldedTypes = TypeList<F32, F16, BF16>;  // gradients, in the order of DType

}  // namespace tessera::codec
