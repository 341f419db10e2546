// The value of every element of a test tensor, a function of its position only. Small integers, so that every dtype
// holds them and every order of reduction gives the same bits; a few dtypes take raw bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "codec/simd/cast.h"
#include "tessera/dtype.h"
#include "tessera/layout.h"

namespace tessera::test {

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The value on rank `term` of `terms`: 1..4 if there are several, up to 2^11 if there is one.
inline int64_t term_value(uint64_t seed, int64_t version, Index element, int term, int terms) {
  const uint64_t hash = mix(seed + mix(static_cast<uint64_t>(version)) + static_cast<uint64_t>(element) * 131 +
                            static_cast<uint64_t>(term) * 7);
  return terms == 1 ? static_cast<int64_t>(hash % 2048) : 1 + static_cast<int64_t>(hash % 4);
}

// A float-like number times 1/1, as `dtype` stores it; other dtypes take the integer's low bits.
inline void store_value(DType dtype, double value, std::byte* out) {
  const auto integer = static_cast<int64_t>(value);
  switch (dtype) {
    case DType::kF64:
      std::memcpy(out, &value, 8);
      return;
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16: {
      const auto single = static_cast<float>(value);
      if (dtype == DType::kF32)
        std::memcpy(out, &single, 4);
      else
        cast_row(DType::kF32, dtype)(&single, out, 1);
      return;
    }
    case DType::kC64: {
      const float parts[2] = {static_cast<float>(value), -static_cast<float>(value)};
      std::memcpy(out, parts, 8);
      return;
    }
    case DType::kBool:
      out[0] = static_cast<std::byte>(integer & 1);
      return;
    default:
      std::memcpy(out, &integer, static_cast<size_t>(bits_of(dtype)) / 8);
      return;
  }
}

inline double reduced_value(DType dtype, std::optional<ReduceOp> op, uint64_t seed, int64_t version, Index element,
                            int terms) {
  double result = static_cast<double>(term_value(seed, version, element, 0, terms));
  for (int term = 1; term < terms; ++term) {
    const auto value = static_cast<double>(term_value(seed, version, element, term, terms));
    switch (*op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result += value;
        break;
      case ReduceOp::kMin:
        result = result < value ? result : value;
        break;
      case ReduceOp::kMax:
        result = result > value ? result : value;
        break;
      case ReduceOp::kProduct:
        result *= value;
        break;
    }
  }
  if (op == ReduceOp::kAvg)
    result = dtype == DType::kF64 ? result / terms
                                  : static_cast<double>(static_cast<float>(result) / static_cast<float>(terms));
  return result;
}

}  // namespace tessera::test
