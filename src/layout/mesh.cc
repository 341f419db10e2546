#include <algorithm>
#include <limits>
#include <numeric>

#include "base/fail.h"
#include "layout/text_reader.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// Whether the text form can hold the name.
bool is_axis_name(std::string_view text) {
  return TextReader("axis", text).name() == text;
}

// The product of the sizes, after all checks of single axes.
int checked_size(std::span<const Axis> axes) {
  if (axes.empty() || axes.size() > kMaxAxes) {
    fail(ErrorCode::kInvalidArgument, "a mesh of {} axes: it must have 1 to {}"_message, axes.size(), kMaxAxes);
  }
  Index product = 1;
  for (size_t i = 0; i < axes.size(); ++i) {
    const Axis& axis = axes[i];
    if (axis.size < 1)
      fail(ErrorCode::kInvalidArgument, "mesh axis {} has size {}: it must be at least 1"_message, i, axis.size);
    if (!is_axis_name(axis.name)) {
      fail(ErrorCode::kInvalidArgument, "mesh axis {} is named {}: a name is letters, digits, '_', '-' and '.'"_message,
           i, tessera::quoted(axis.name));
    }
    const auto same = [&](const Axis& other) { return !axis.name.empty() && other.name == axis.name; };
    if (std::any_of(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(i), same)) {
      fail(ErrorCode::kInvalidArgument, "two mesh axes are named \"{}\""_message, axis.name);
    }
    product *= axis.size;
    if (product > kMaxRanks) fail(ErrorCode::kInvalidArgument, "a mesh of more than {} ranks"_message, kMaxRanks);
  }
  return static_cast<int>(product);
}

std::vector<Rank> consecutive(int count, Rank first) {
  if (first < 0 || first > std::numeric_limits<Rank>::max() - (count - 1)) {
    fail(ErrorCode::kInvalidArgument, "{} ranks from {}: ranks are 0 to {}"_message, count, first,
         std::numeric_limits<Rank>::max());
  }
  std::vector<Rank> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

}  // namespace

Mesh::Mesh(std::vector<Axis> axes, Rank first) {
  std::vector<Rank> ranks = consecutive(checked_size(axes), first);
  body_ = std::make_shared<const Body>(Body{.axes = std::move(axes), .ranks = std::move(ranks), .positions = {}});
}

Mesh::Mesh(std::vector<Axis> axes, std::vector<Rank> ranks) {
  const int expected = checked_size(axes);
  if (ranks.size() != static_cast<size_t>(expected)) {
    fail(ErrorCode::kInvalidArgument, "{} rank{} for a mesh of {}"_message, ranks.size(), ranks.size() == 1 ? "" : "s",
         expected);
  }
  bool are_consecutive = true;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0) fail(ErrorCode::kInvalidArgument, "rank {} in a mesh: ranks are not negative"_message, ranks[i]);
    are_consecutive &= ranks[i] - ranks[0] == static_cast<Rank>(i);
  }
  std::vector<std::pair<Rank, int>> positions;
  if (!are_consecutive) {
    positions.reserve(ranks.size());
    for (size_t i = 0; i < ranks.size(); ++i) positions.emplace_back(ranks[i], static_cast<int>(i));
    std::sort(positions.begin(), positions.end());
    const auto twice = std::adjacent_find(positions.begin(), positions.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != positions.end())
      fail(ErrorCode::kInvalidArgument, "rank {} is twice in the mesh"_message, twice->first);
  }
  body_ = std::make_shared<const Body>(
      Body{.axes = std::move(axes), .ranks = std::move(ranks), .positions = std::move(positions)});
}

bool Mesh::operator==(const Mesh& other) const {
  return body_ == other.body_ ||
         (std::ranges::equal(axes(), other.axes()) && std::ranges::equal(ranks(), other.ranks()));
}

std::optional<int> Mesh::position_of(Rank rank) const {
  if (!body_) return std::nullopt;
  const auto& positions = body_->positions;
  if (positions.empty()) {
    const int64_t position = int64_t{rank} - body_->ranks[0];
    if (position < 0 || position >= size()) return std::nullopt;
    return static_cast<int>(position);
  }
  const auto at = std::lower_bound(positions.begin(), positions.end(), std::pair(rank, 0));
  if (at == positions.end() || at->first != rank) return std::nullopt;
  return at->second;
}

std::vector<int> Mesh::coordinate(int position) const {
  TESSERA_CHECK(0 <= position && position < size());
  std::vector<int> along(axes().size());
  for (size_t i = along.size(); i-- > 0;) {
    const int size = axes()[i].size;
    along[i] = position % size;
    position /= size;
  }
  return along;
}

}  // namespace tessera
