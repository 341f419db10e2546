#include "plan/colour.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::plan {
namespace {

constexpr double kHues = 310;  // degrees; less than a full circle, so that the first and the last differ
constexpr double kSaturation = 0.62;
constexpr size_t kDistinctHues = 12;

// CSS Color Module Level 4, "HSL to sRGB": hue in degrees, the other values from 0 to 1.
std::string hex_of_hsl(double hue, double saturation, double lightness) {
  const auto channel = [&](double n) {
    const double k = std::fmod(n + hue / 30, 12);
    const double chroma = saturation * std::min(lightness, 1 - lightness);
    return std::lround(255 * (lightness - chroma * std::max(-1.0, std::min({k - 3, 9 - k, 1.0}))));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

}  // namespace

std::string rank_colour(size_t index, size_t count) {
  const double hue = kHues * static_cast<double>(index) / static_cast<double>(std::max<size_t>(count, 1));
  const bool dark = count > kDistinctHues && index % 2 == 1;
  return hex_of_hsl(hue, kSaturation, dark ? 0.5 : 0.64);
}

}  // namespace tessera::plan
