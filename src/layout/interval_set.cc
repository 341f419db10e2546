#include <algorithm>

#include "base/fail.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// The last interval that begins at or below `element`, or end() where none does.
auto interval_at(std::span<const Interval> intervals, Index element) {
  const auto after = std::upper_bound(intervals.begin(), intervals.end(), element,
                                      [](Index value, const Interval& interval) { return value < interval.begin; });
  return after == intervals.begin() ? intervals.end() : after - 1;
}

}  // namespace

IntervalSet::IntervalSet(Interval interval) {
  if (interval.begin >= interval.end) return;
  intervals_.push_back(interval);
  size_ = interval.size();
}

IntervalSet IntervalSet::of_sorted(std::span<const Interval> intervals) {
  IntervalSet set;
  set.intervals_.reserve(intervals.size());
  for (const Interval& interval : intervals) {
    if (interval.begin >= interval.end) continue;
    if (!set.intervals_.empty() && interval.begin <= set.intervals_.back().end) {
      TESSERA_CHECK_LE(set.intervals_.back().begin, interval.begin);
      set.intervals_.back().end = std::max(set.intervals_.back().end, interval.end);
    } else {
      set.intervals_.push_back(interval);
    }
  }
  const bool several = set.intervals_.size() > 1;
  if (several) set.before_.reserve(set.intervals_.size());
  for (const Interval& interval : set.intervals_) {
    if (several) set.before_.push_back(set.size_);
    set.size_ += interval.size();
  }
  return set;
}

bool IntervalSet::contains(Index element) const {
  const std::span<const Interval> all = intervals();
  const auto at = interval_at(all, element);
  return at != all.end() && element < at->end;
}

Index IntervalSet::position_of(Index element) const {
  const std::span<const Interval> all = intervals();
  const auto at = interval_at(all, element);
  if (at == all.end()) return 0;
  const Index before = before_.empty() ? 0 : before_[static_cast<size_t>(at - all.begin())];
  return before + std::min(element, at->end) - at->begin;
}

IntervalSet IntervalSet::slice(Index first, Index last) const {
  std::vector<Interval> cut;
  append_slice(first, last, cut);
  return cut.size() == 1 ? IntervalSet(cut.front()) : of_sorted(cut);
}

void IntervalSet::append_slice(Index first, Index last, std::vector<Interval>& out) const {
  TESSERA_CHECK(0 <= first && first <= last && last <= size_);
  if (first == last) return;
  if (before_.empty()) {
    const Index origin = intervals_.front().begin;
    out.push_back({origin + first, origin + last});
    return;
  }
  // From the interval that holds position `first` on, every one that begins below position `last`.
  auto i = static_cast<size_t>(std::upper_bound(before_.begin(), before_.end(), first) - before_.begin() - 1);
  for (; i < intervals_.size() && before_[i] < last; ++i) {
    const Interval& interval = intervals_[i];
    out.push_back({interval.begin + std::max<Index>(first - before_[i], 0),
                   interval.begin + std::min(last - before_[i], interval.size())});
  }
}

IntervalSet IntervalSet::intersect(const IntervalSet& other) const {
  if (empty() || other.empty()) return {};
  if (intervals_.size() == 1 && other.intervals_.size() == 1) {
    return IntervalSet({std::max(intervals_[0].begin, other.intervals_[0].begin),
                        std::min(intervals_[0].end, other.intervals_[0].end)});
  }
  // Start both sides at the first interval that can matter, so that a short set in a long one costs a search.
  const Index from = std::max(intervals_.front().begin, other.intervals_.front().begin);
  const auto ends_by = [](const Interval& interval, Index value) { return interval.end <= value; };
  auto a = std::lower_bound(intervals_.begin(), intervals_.end(), from, ends_by);
  auto b = std::lower_bound(other.intervals_.begin(), other.intervals_.end(), from, ends_by);
  std::vector<Interval> common;
  while (a != intervals_.end() && b != other.intervals_.end()) {
    const Interval both{std::max(a->begin, b->begin), std::min(a->end, b->end)};
    if (both.begin < both.end) common.push_back(both);
    if (a->end < b->end) {
      ++a;
    } else {
      ++b;
    }
  }
  return of_sorted(common);
}

}  // namespace tessera
