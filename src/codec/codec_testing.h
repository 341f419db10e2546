// For the codec's tests: the variants that this CPU supports, and memory with guarded surroundings.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec/simd/kernel.h"

namespace tessera {

// Runs a test with every variant forced in turn.
class EveryKernelTest : public testing::TestWithParam<std::string> {
 private:
  ForcedKernel forced_{GetParam()};
};

inline auto every_kernel() {
  const auto names = available_kernels();
  return testing::ValuesIn(std::vector<std::string>(names.begin(), names.end()));
}
inline std::string kernel_name(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}

// `size` bytes that start `misalignment` bytes after a cache line boundary. Writes around them are detected.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t size, size_t misalignment = 0)
      : size_(size), bytes_(size + misalignment + 3 * kGuard, kFill) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data()) + kGuard;
    start_ = kGuard + (kGuard - address % kGuard) % kGuard + misalignment;
  }
  std::byte* data() { return bytes_.data() + start_; }
  size_t size() const { return size_; }
  bool intact() const {
    const auto is_fill = [](std::byte b) { return b == kFill; };
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(start_), is_fill) &&
           std::all_of(bytes_.begin() + static_cast<ptrdiff_t>(start_ + size_), bytes_.end(), is_fill);
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr std::byte kFill{0xA5};
  size_t size_;
  size_t start_ = 0;
  std::vector<std::byte> bytes_;
};

inline std::vector<std::byte> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

}  // namespace tessera
