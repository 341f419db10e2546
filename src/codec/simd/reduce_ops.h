// One step of each reduction, on plain values.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace tessera::codec {

// A type whose arithmetic wraps, even for small integers, which would be promoted to int.
template <typename T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, uint32_t>;

struct Add {
  template <typename T>
  static T apply(T acc, T x) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(acc) + static_cast<Wrapping<T>>(x));
    } else {
      return acc + x;
    }
  }
};

struct Multiply {
  template <typename T>
  static T apply(T acc, T x) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(acc) * static_cast<Wrapping<T>>(x));
    } else {
      return acc * x;
    }
  }
};

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(x);
  } else {
    return false;
  }
}

struct Minimum {
  template <typename T>
  static T apply(T acc, T x) {
    return x < acc || is_nan(x) ? x : acc;
  }
};

struct Maximum {
  template <typename T>
  static T apply(T acc, T x) {
    return x > acc || is_nan(x) ? x : acc;
  }
};

}  // namespace tessera::codec
