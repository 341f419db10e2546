// The random Hadamard transform before NVFP4's column plane: fixed signs, then a 16-point Sylvester matrix times 1/4.
#pragma once

#include <bit>
#include <cstddef>

namespace tessera::codec {

inline constexpr size_t kHadamard = 16;
inline constexpr int kHadamardSigns[kHadamard] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

// The factor of element i in the sum of result j.
constexpr float hadamard_factor(size_t i, size_t j) {
  const bool minus = std::popcount(i & j) % 2 == 1;
  return static_cast<float>(kHadamardSigns[i]) * (minus ? -0.25F : 0.25F);
}

}  // namespace tessera::codec
