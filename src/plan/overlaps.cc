#include "plan/overlaps.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::plan {
namespace {

struct Segment {
  int src;
  int dst;
  Interval interval;
};

struct Owned {
  Interval interval;
  int part;
};

std::vector<Owned> in_dim_order(const DimPartition& partition) {
  std::vector<Owned> owned;
  for (size_t part = 0; part < partition.parts.size(); ++part)
    for (const Interval interval : partition.parts[part].intervals())
      owned.push_back({interval, static_cast<int>(part)});
  std::ranges::sort(owned, {}, [](const Owned& o) { return o.interval; });
  return owned;
}

// Both sides cover the dim, so one sweep from its start to its end finds every pair that overlaps.
std::vector<Segment> sweep(const std::vector<Owned>& src, const std::vector<Owned>& dst) {
  std::vector<Segment> segments;
  segments.reserve(src.size() + dst.size());
  for (size_t s = 0, d = 0; s < src.size() && d < dst.size();) {
    const Index begin = std::max(src[s].interval.begin, dst[d].interval.begin);
    const Index end = std::min(src[s].interval.end, dst[d].interval.end);
    TESSERA_CHECK_LT(begin, end);
    segments.push_back({src[s].part, dst[d].part, {begin, end}});
    if (src[s].interval.end == end) ++s;
    if (dst[d].interval.end == end) ++d;
  }
  return segments;
}

// begin[p] .. begin[p + 1] are the entries of part p.
template <typename Overlaps, typename Part>
std::vector<size_t> index_by(const Overlaps& overlaps, size_t parts, Part part_of) {
  std::vector<size_t> begin(parts + 1, 0);
  for (const auto& overlap : overlaps) ++begin[static_cast<size_t>(part_of(overlap)) + 1];
  for (size_t p = 0; p < parts; ++p) begin[p + 1] += begin[p];
  return begin;
}

}  // namespace

DimOverlaps::DimOverlaps(const DimPartition& src, const DimPartition& dst) {
  std::vector<Segment> segments = sweep(in_dim_order(src), in_dim_order(dst));
  std::ranges::sort(segments, {}, [](const Segment& s) { return std::tuple(s.src, s.dst, s.interval.begin); });

  for (const IntervalSet& part : src.parts) source_size_.push_back(part.size());
  std::vector<Interval> intervals;
  for (size_t first = 0; first < segments.size();) {
    const Segment& head = segments[first];
    intervals.clear();
    size_t next = first;
    for (; next < segments.size() && segments[next].src == head.src && segments[next].dst == head.dst; ++next)
      intervals.push_back(segments[next].interval);
    const bool same_source = !overlaps_.empty() && overlaps_.back().src == head.src;
    const Index before = same_source ? overlaps_.back().before + overlaps_.back().size : 0;
    IntervalSet set = IntervalSet::of_sorted(intervals);
    const Index size = set.size();
    overlaps_.push_back({head.src, head.dst, before, size, std::move(set)});
    first = next;
  }

  source_begin_ = index_by(overlaps_, src.parts.size(), [](const Overlap& o) { return o.src; });
  destination_begin_ = index_by(overlaps_, dst.parts.size(), [](const Overlap& o) { return o.dst; });
  by_destination_.resize(overlaps_.size());
  std::vector<size_t> next = destination_begin_;
  for (const Overlap& overlap : overlaps_) by_destination_[next[static_cast<size_t>(overlap.dst)]++] = &overlap;
}

const Overlap* DimOverlaps::find(int src, int dst) const {
  const auto of_src = of_source(src);
  const auto at = std::ranges::lower_bound(of_src, dst, {}, &Overlap::dst);
  return at != of_src.end() && at->dst == dst ? &*at : nullptr;
}

std::vector<Index> DimOverlaps::edges() const {
  std::vector<Index> edges;
  for (const Overlap& overlap : overlaps_) {
    for (const Interval interval : overlap.set.intervals()) {
      edges.push_back(interval.begin);
      edges.push_back(interval.end);
    }
  }
  return edges;
}

size_t DimOverlaps::memory_bytes() const {
  size_t bytes = overlaps_.capacity() * sizeof(Overlap) + by_destination_.capacity() * sizeof(Overlap*) +
                 (source_begin_.capacity() + destination_begin_.capacity()) * sizeof(size_t) +
                 source_size_.capacity() * sizeof(Index);
  for (const Overlap& overlap : overlaps_) bytes += overlap.set.intervals().size_bytes();
  return bytes;
}

}  // namespace tessera::plan
