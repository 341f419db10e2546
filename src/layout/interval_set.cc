#include <algorithm>
#include <memory>
#include <utility>

#include "base/fail.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// The last interval that begins at or below `element`, or end() if there is none.
auto interval_at(std::span<const Interval> intervals, Index element) {
  const auto after = std::upper_bound(intervals.begin(), intervals.end(), element,
                                      [](Index value, const Interval& interval) { return value < interval.begin; });
  return after == intervals.begin() ? intervals.end() : after - 1;
}

}  // namespace

IntervalSet::IntervalSet(Interval interval) {
  if (interval.begin >= interval.end) return;
  only_ = interval;
  size_ = interval.size();
}

IntervalSet IntervalSet::of_sorted(std::span<const Interval> intervals) {
  std::vector<Interval> list;
  list.reserve(intervals.size());
  for (const Interval& interval : intervals) {
    if (interval.begin >= interval.end) continue;
    if (!list.empty() && interval.begin <= list.back().end) {
      TESSERA_CHECK_LE(list.back().begin, interval.begin);
      list.back().end = std::max(list.back().end, interval.end);
    } else {
      list.push_back(interval);
    }
  }
  if (list.size() < 2) return list.empty() ? IntervalSet() : IntervalSet(list.front());
  IntervalSet set;
  std::vector<Index> before;
  before.reserve(list.size());
  for (const Interval& interval : list) {
    before.push_back(set.size_);
    set.size_ += interval.size();
  }
  set.several_ = std::make_shared<Several>(Several{.list = std::move(list), .before = std::move(before)});
  return set;
}

bool IntervalSet::operator==(const IntervalSet& other) const {
  return size_ == other.size_ &&
         (several_ ? several_ == other.several_ || std::ranges::equal(intervals(), other.intervals())
                   : other.several_ == nullptr && only_ == other.only_);
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
  const Index before = several_ ? several_->before[static_cast<size_t>(at - all.begin())] : 0;
  return before + std::min(element, at->end) - at->begin;
}

IntervalSet IntervalSet::slice(Index first, Index last) const {
  if (first == 0 && last == size_) return *this;
  std::vector<Interval> cut;
  append_slice(first, last, cut);
  return cut.size() == 1 ? IntervalSet(cut.front()) : of_sorted(cut);
}

void IntervalSet::append_slice(Index first, Index last, std::vector<Interval>& out) const {
  TESSERA_CHECK(0 <= first && first <= last && last <= size_);
  if (first == last) return;
  if (!several_) {
    out.push_back({only_.begin + first, only_.begin + last});
    return;
  }
  // From the interval with position `first` on, every one that begins below position `last`.
  const auto& [list, before] = *several_;
  auto i = static_cast<size_t>(std::upper_bound(before.begin(), before.end(), first) - before.begin() - 1);
  for (; i < list.size() && before[i] < last; ++i) {
    const Interval& interval = list[i];
    out.push_back({interval.begin + std::max<Index>(first - before[i], 0),
                   interval.begin + std::min(last - before[i], interval.size())});
  }
}

IntervalSet IntervalSet::intersect(const IntervalSet& other) const {
  if (empty() || other.empty()) return {};
  if (!several_ && !other.several_) {
    return IntervalSet({std::max(only_.begin, other.only_.begin), std::min(only_.end, other.only_.end)});
  }
  // Starts both sides at the first interval that can matter, so that a short set in a long one costs only a search.
  const std::span<const Interval> ours = intervals(), theirs = other.intervals();
  const Index from = std::max(ours.front().begin, theirs.front().begin);
  const auto ends_by = [](const Interval& interval, Index value) { return interval.end <= value; };
  auto a = std::lower_bound(ours.begin(), ours.end(), from, ends_by);
  auto b = std::lower_bound(theirs.begin(), theirs.end(), from, ends_by);
  std::vector<Interval> common;
  while (a != ours.end() && b != theirs.end()) {
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
