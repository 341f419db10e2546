#include "bus/lending/messages.h"

#include "base/fail.h"

namespace tessera::bus {

// Whether a region lies within a tensor of that shape.
static void check_within(const Region& region, const Shape& shape) {
  bool within = static_cast<size_t>(region.ndim()) == shape.size();
  for (int d = 0; within && d < region.ndim(); ++d)
    within = region.dim(d).intervals().back().end <= shape[static_cast<size_t>(d)];
  if (!within)
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} of a tensor of {}"_message, region.to_string(),
         to_string_shape(shape));
}

void write_region(const Region& region, ByteWriter& out) {
  out.put(static_cast<uint8_t>(region.ndim()));
  for (const IntervalSet& dim : region.dims()) {
    out.put(static_cast<uint32_t>(dim.intervals().size()));
    for (const Interval& interval : dim.intervals()) {
      out.put(interval.begin);
      out.put(interval.end);
    }
  }
}

Region read_region(ByteReader& in) {
  const auto ndim = in.get<uint8_t>();
  if (ndim > kMaxDims) fail(ErrorCode::kInvalidArgument, "MakeRun: a region of {} dims"_message, ndim);
  std::vector<IntervalSet> dims;
  for (int d = 0; d < ndim; ++d) {
    std::vector<Interval> intervals;
    for (uint32_t count = in.get_count(kMaxIntervals, 2 * sizeof(Index)); count > 0; --count) {
      Interval interval;
      interval.begin = in.get<Index>();
      interval.end = in.get<Index>();
      const Index after = intervals.empty() ? -1 : intervals.back().end;
      if (interval.begin <= after || interval.end <= interval.begin || interval.end > kMaxElements)
        fail(ErrorCode::kInvalidArgument, "MakeRun: the interval [{}, {}) after {}"_message, interval.begin,
             interval.end, after);
      intervals.push_back(interval);
    }
    if (intervals.empty()) fail(ErrorCode::kInvalidArgument, "MakeRun: a region that holds nothing"_message);
    dims.push_back(IntervalSet::of_sorted(intervals));
  }
  Region region(std::move(dims));
  element_count(region.extents());
  return region;
}

void check_route(const RouteRegion& what) {
  element_count(what.shape);
  check_within(what.region, what.shape);
}

void check_place(const RouteRegion& what, const LentPlace& place) {
  if (place.kind == LentPlace::Kind::kTensor) return;
  const LocalArray& array = place.array;
  check_within(array.owned, what.shape);
  if (array.strides.size() != what.shape.size())
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} strides for {} dims"_message, array.strides.size(),
         what.shape.size());
  if (array.owned.intersect(what.region) != what.region)
    fail(ErrorCode::kInvalidArgument, "MakeRun: {} is not within {}"_message, what.region.to_string(),
         array.owned.to_string());
}

}  // namespace tessera::bus
