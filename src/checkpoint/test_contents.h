// For tests: contents of tensors, and the errors of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "base/testing.h"
#include "tessera/layout.h"

namespace tessera::checkpoint {

inline std::vector<std::byte> random_bytes(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Element by element, from the definition: the oracle for slices.
inline std::vector<std::byte> slice_by_element(const std::vector<std::byte>& whole, const Shape& shape,
                                               const Region& region, size_t element_bytes) {
  std::vector<std::byte> slice;
  const Index total = std::accumulate(shape.begin(), shape.end(), Index{1}, std::multiplies<>());
  for (Index element = 0; element < total; ++element) {
    Index rest = element;
    bool inside = true;
    for (int d = static_cast<int>(shape.size()) - 1; d >= 0; --d) {
      inside = inside && region.dim(d).contains(rest % shape[static_cast<size_t>(d)]);
      rest /= shape[static_cast<size_t>(d)];
    }
    const auto* first = whole.data() + static_cast<size_t>(element) * element_bytes;
    if (inside) slice.insert(slice.end(), first, first + element_bytes);
  }
  return slice;
}

}  // namespace tessera::checkpoint
