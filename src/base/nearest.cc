#include "base/nearest.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kMost = 3;
constexpr size_t kMostNames = 10'000;
constexpr size_t kMostBytes = 256;  // longer names do not differ by typing errors

// The edit distance (optimal string alignment), or more than `limit`.
size_t distance(std::string_view a, std::string_view b, size_t limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() > limit) return limit + 1;
  std::vector<size_t> before(a.size() + 1), last(a.size() + 1), row(a.size() + 1);
  for (size_t i = 0; i <= a.size(); ++i) last[i] = i;
  for (size_t j = 1; j <= b.size(); ++j) {
    row[0] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      row[i] = std::min({last[i] + 1, row[i - 1] + 1, last[i - 1] + (a[i - 1] != b[j - 1] ? 1 : 0)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[i] = std::min(row[i], before[i - 2] + 1);
    }
    if (std::ranges::min(row) > limit) return limit + 1;
    before.swap(last);
    last.swap(row);
  }
  return last.back();
}

bool follows_a_prefix(std::string_view longer, std::string_view shorter) {
  return longer.size() > shorter.size() && longer.ends_with(shorter) &&
         longer[longer.size() - shorter.size() - 1] == '.';
}

}  // namespace

std::vector<std::string_view> nearest(std::string_view name, std::span<const std::string_view> names) {
  if (name.empty() || name.size() > kMostBytes) return {};
  const size_t limit = std::max<size_t>(1, std::min<size_t>(name.size() / 3, 8));
  std::vector<std::pair<size_t, std::string_view>> found;
  for (const std::string_view other : names.first(std::min(names.size(), kMostNames))) {
    if (other.empty() || other.size() > kMostBytes) continue;
    const bool prefixed = follows_a_prefix(other, name) || follows_a_prefix(name, other);
    const size_t apart = prefixed ? 1 : distance(name, other, limit);
    if (apart <= limit) found.emplace_back(apart, other);
  }
  std::ranges::stable_sort(found, {}, &std::pair<size_t, std::string_view>::first);
  std::vector<std::string_view> best;
  for (const auto& [apart, other] : found)
    if (best.size() < kMost && apart <= 2 * found.front().first) best.push_back(other);
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string_view> names) {
  const std::vector<std::string_view> best = nearest(name, names);
  std::string text;
  for (size_t i = 0; i < best.size(); ++i) {
    text += i == 0 ? "; did you mean " : i + 1 == best.size() ? " or " : ", ";
    text += best[i];
  }
  return text.empty() ? text : text + "?";
}

}  // namespace tessera
