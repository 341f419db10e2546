#include "plan/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tessera::plan {

std::string ranks_text(std::span<const Rank> ranks, size_t limit) {
  const Rank step = ranks.size() > 3 ? ranks[1] - ranks[0] : 1;
  if (step > 1 && std::ranges::adjacent_find(ranks, [&](Rank a, Rank b) { return b - a != step; }) == ranks.end())
    return fmt::format("{},{},..,{}", ranks[0], ranks[1], ranks.back());
  std::string text;
  size_t runs = 0;
  for (size_t first = 0; first < ranks.size(); ++runs) {
    if (runs == limit) return text + fmt::format(" and {} more", ranks.size() - first);
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last == first + 1) last = first;  // two in a row are easier to read apart
    if (!text.empty()) text += ',';
    text += first == last ? fmt::to_string(ranks[first]) : fmt::format("{}-{}", ranks[first], ranks[last]);
    first = last + 1;
  }
  return text;
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.4g} {}", value, kUnits[unit]);
}

std::string count_text(int64_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string ratio_text(int64_t part, int64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.2f}", static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace tessera::plan
