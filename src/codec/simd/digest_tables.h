// The multipliers of docs/formats/digest.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::codec {

inline constexpr size_t kBlockWords = 1024;
inline constexpr size_t kBlockBytes = kBlockWords * sizeof(uint32_t);

// Output `index` of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), started with `seed`.
constexpr uint64_t splitmix64(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// In ASCII, most significant byte first: "TESSERA0", "TESSERA1" and "TESSERA2", "TESSERA3".
inline constexpr uint64_t kWordSeed[2] = {0x5445535345524130, 0x5445535345524131};
inline constexpr uint64_t kBlockSeed[2] = {0x5445535345524132, 0x5445535345524133};

// T_k, followed by zeros, since a vector may read past its end.
using WordMultipliers = std::array<uint32_t, kBlockWords + 64>;
constexpr WordMultipliers word_multipliers(int k) {
  WordMultipliers table{};
  for (size_t i = 0; i < kBlockWords; ++i) table[i] = static_cast<uint32_t>(splitmix64(kWordSeed[k], i) >> 32) | 1;
  return table;
}
alignas(64) inline constexpr WordMultipliers kWordMultipliers[2] = {word_multipliers(0), word_multipliers(1)};

// H_k(block).
constexpr uint64_t block_multiplier(int k, uint64_t block) {
  return splitmix64(kBlockSeed[k], block) | 1;
}

}  // namespace tessera::codec
