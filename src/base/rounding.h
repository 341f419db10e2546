// Rounding sizes to whole units.
#pragma once

#include <type_traits>

namespace tessera {

// The least multiple of `unit` that is at least n. REQUIRES: n >= 0, unit > 0, and the result is representable
template <typename T>
constexpr T round_up(T n, std::type_identity_t<T> unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace tessera
