// For tests: float formats by table search, implemented independently of the code under test. A format is a list of all
// its finite values, computed with ldexp; encoding searches the list for the nearest one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace tessera {

class FloatOracle {
 public:
  struct Format {
    int exponent_bits;
    int mantissa_bits;
    bool ieee;       // the last exponent is for infinity and NaN; otherwise only its last code is NaN
    bool saturates;  // encoding never gives infinity
    uint32_t nan;
  };

  explicit FloatOracle(const Format& format) : format_(format) {
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    const int last = (1 << format.exponent_bits) - 1;
    for (int e = 0; e <= last; ++e) {
      for (int m = 0; m < 1 << format.mantissa_bits; ++m) {
        const bool special = e == last && (format.ieee || m == (1 << format.mantissa_bits) - 1);
        if (special) continue;
        const double fraction = std::ldexp(m, -format.mantissa_bits);
        values_.push_back(e == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, e - bias));
      }
    }
    // Where the next value would be if there were one: a value that rounds to it is too large.
    const double step = values_.back() - values_[values_.size() - 2];
    overflow_ = values_.back() + step;
  }

  // Finite values by code, ascending, without signs.
  const std::vector<double>& values() const { return values_; }
  double overflow() const { return overflow_; }
  uint32_t sign_bit() const { return 1U << (format_.exponent_bits + format_.mantissa_bits); }

  double decode(uint32_t code) const {
    const uint32_t magnitude = code % sign_bit();
    const double sign = code >= sign_bit() ? -1 : 1;
    if (magnitude < values_.size()) return sign * values_[magnitude];
    if (format_.ieee && magnitude == values_.size()) return sign * std::numeric_limits<double>::infinity();
    return std::numeric_limits<double>::quiet_NaN();
  }

  uint32_t encode(double x) const {
    if (std::isnan(x)) return format_.nan;
    return nearest(std::fabs(x)) + (std::signbit(x) ? sign_bit() : 0);
  }

 private:
  uint32_t nearest(double x) const {
    const auto top = static_cast<uint32_t>(values_.size() - 1);
    const uint32_t too_large = format_.saturates ? top : top + 1;
    if (x >= overflow_) return too_large;
    const auto above = static_cast<uint32_t>(std::lower_bound(values_.begin(), values_.end(), x) - values_.begin());
    if (above <= top && values_[above] == x) return above;
    const double high = above <= top ? values_[above] : overflow_;
    const double low = values_[above - 1];
    const bool up = high - x < x - low || (high - x == x - low && above % 2 == 0);
    return up ? std::min(above, too_large) : above - 1;
  }

  Format format_;
  std::vector<double> values_;
  double overflow_ = 0;
};

inline const FloatOracle& f16_oracle() {
  static const FloatOracle oracle({5, 10, true, false, 0x7E00});
  return oracle;
}
inline const FloatOracle& bf16_oracle() {
  static const FloatOracle oracle({8, 7, true, false, 0x7FC0});
  return oracle;
}
inline const FloatOracle& e4m3_oracle() {
  static const FloatOracle oracle({4, 3, false, true, 0x7F});
  return oracle;
}
inline const FloatOracle& e5m2_oracle() {
  static const FloatOracle oracle({5, 2, true, true, 0x7F});
  return oracle;
}

}  // namespace tessera
