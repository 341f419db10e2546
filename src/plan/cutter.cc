#include "plan/cutter.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::plan {
namespace {

constexpr Index kTolerance = 64;  // a cut may be off by a share divided by this

Index round_to(Index value, Index unit) {
  return (value + unit / 2) / unit * unit;
}

}  // namespace

Cutter::Cutter(std::span<const Index> extents, std::span<const Index> places, const CutRules& rules)
    : ndim_(static_cast<int>(extents.size())), rules_(rules) {
  for (int d = ndim_; d-- > 0;) {
    const auto i = static_cast<size_t>(d);
    extent_[i] = extents[i];
    slice_[i] = size_;
    size_ *= extents[i];
  }
  dim_ = first_fine_dim(places);
  // Omits a cut that is too close to the one before it: its piece is empty.
  if (dim_ >= 0) {
    const auto i = static_cast<size_t>(dim_);
    const Index across = size_ / extent_[i];
    const Index unit = across * rules.granule[i];
    cut_.push_back(0);
    for (const Index place : places) {
      const Index cut = round_to(snap(place, size_, unit), unit) / across;
      cut_.push_back((cut - cut_.back()) * across < rules.min_piece ? cut_.back() : cut);
    }
    cut_.push_back(extent_[i]);
    return;
  }
  point_.push_back({});
  for (const Index place : places) {
    const Point point = point_at(place);
    point_.push_back(elements_before(point) - elements_before(point_.back()) < rules.min_piece ? point_.back() : point);
  }
  point_.push_back({});
  if (ndim_ > 0) point_.back()[0] = extent_[0];
}

Index Cutter::elements_before(const Point& point) const {
  Index elements = 0;
  for (size_t d = 0; d < static_cast<size_t>(ndim_); ++d) elements += point[d] * slice_[d];
  return elements;
}

// Moves a cut by up to `unit`; if that would leave a piece of less than min_piece, the cut goes to the nearer end.
Index Cutter::snap(Index place, Index size, Index unit) const {
  const Index margin = rules_.min_piece > 1 ? rules_.min_piece + unit : 0;
  if (std::min(place, size - place) >= margin) return place;
  return place <= size - place ? 0 : size;
}

int Cutter::first_fine_dim(std::span<const Index> places) const {
  for (int d = 0; d < ndim_; ++d) {
    const auto i = static_cast<size_t>(d);
    if (rules_.granule[i] == 0) continue;
    const Index unit = size_ / extent_[i] * rules_.granule[i];
    const bool fine = std::ranges::all_of(
        places, [&](Index place) { return std::abs(round_to(place, unit) - place) <= rules_.share / kTolerance; });
    if (fine) return d;
  }
  return -1;
}

bool Cutter::can_cut_below(int dim) const {
  for (int d = dim + 1; d < ndim_; ++d) {
    const auto i = static_cast<size_t>(d);
    if (rules_.granule[i] > 0 && extent_[i] > rules_.granule[i]) return true;
  }
  return false;
}

Cutter::Point Cutter::point_at(Index place) const {
  Point point{};
  Index size = size_;
  for (int d = 0; d < ndim_; ++d) {
    const auto i = static_cast<size_t>(d);
    const Index granule = rules_.granule[i];
    place = snap(place, size, slice_[i]);
    if (granule != 1 || !can_cut_below(d)) {
      if (granule > 0) point[i] = round_to(place, slice_[i] * granule) / slice_[i];
      break;
    }
    point[i] = place / slice_[i];
    place %= slice_[i];
    if (place == 0) break;
    size = slice_[i];
  }
  for (size_t d = static_cast<size_t>(std::max(ndim_, 1)) - 1; d > 0; --d) {
    if (point[d] < extent_[d]) continue;  // the end of one slice is the start of the next
    point[d] = 0;
    ++point[d - 1];
  }
  return point;
}

Box Cutter::whole() const {
  Box box;
  box.last = extent_;
  return box;
}

void Cutter::append_piece(size_t k, std::vector<Box>& boxes) const {
  if (dim_ >= 0) {
    const auto i = static_cast<size_t>(dim_);
    if (cut_[k] >= cut_[k + 1]) return;
    Box box = whole();
    box.first[i] = cut_[k];
    box.last[i] = cut_[k + 1];
    boxes.push_back(box);
    return;
  }
  const Point& begin = point_[k];
  const Point& end = point_[k + 1];
  const auto ndim = static_cast<size_t>(ndim_);
  const auto split = static_cast<size_t>(std::ranges::mismatch(begin, end).in1 - begin.begin());
  if (split >= ndim) return;

  // Slice `at` of every dim before `dim`, [first, last) of `dim`, and all of the later dims.
  const auto append = [&](const Point& at, size_t dim, Index first, Index last) {
    if (first >= last) return;
    Box box = whole();
    for (size_t d = 0; d < dim; ++d) {
      box.first[d] = at[d];
      box.last[d] = at[d] + 1;
    }
    box.first[dim] = first;
    box.last[dim] = last;
    boxes.push_back(box);
  };
  const auto deepest = [&](const Point& point) {  // the last dim in which it is not at the start of a slice
    size_t d = ndim;
    while (d > split + 1 && point[d - 1] == 0) --d;
    return d - 1;
  };
  const size_t head = deepest(begin);
  for (size_t d = head; d > split; --d) append(begin, d, begin[d] + (d < head ? 1 : 0), extent_[d]);
  append(begin, split, begin[split] + (head > split ? 1 : 0), end[split]);
  for (size_t d = split + 1; d <= deepest(end); ++d) append(end, d, 0, end[d]);
}

}  // namespace tessera::plan
