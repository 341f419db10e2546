#include "exec/route.h"

#include <algorithm>

#include "base/fail.h"
#include "exec/route_walk.h"

namespace tessera {
namespace {

Index halved(Index value, const char* what) {
  if (value % 2 != 0) fail(ErrorCode::kInvalidArgument, "f4: {} {} is odd: it lies inside a byte", what, value);
  return value / 2;
}

IntervalSet halved(const IntervalSet& set) {
  std::vector<Interval> intervals(set.intervals().begin(), set.intervals().end());
  for (Interval& interval : intervals) interval = {halved(interval.begin, "cut"), halved(interval.end, "cut")};
  return IntervalSet::of_sorted(intervals);
}

// Region of a route's array, in atoms.
std::vector<IntervalSet> atoms_of(const Region& region, DType dtype) {
  std::vector<IntervalSet> dims(region.dims().begin(), region.dims().end());
  if (elements_per_atom(dtype) == 1) return dims;
  if (dims.empty()) fail(ErrorCode::kInvalidArgument, "f4: a scalar is half a byte");
  dims.back() = halved(dims.back());
  return dims;
}

// One array of a walk: what it owns and its strides.
struct ArrayView {
  std::vector<IntervalSet> owned;
  std::vector<Index> strides;
};

std::vector<Index> packed_strides(std::span<const IntervalSet> dims, int64_t bytes) {
  std::vector<Index> strides(dims.size());
  for (size_t d = dims.size(); d-- > 0;) {
    strides[d] = bytes;
    bytes *= std::max<Index>(dims[d].size(), 1);
  }
  return strides;
}

ArrayView view_of(const LocalArray* array, DType dtype, const std::vector<IntervalSet>& region) {
  if (array == nullptr) return {region, packed_strides(region, atom_bytes(dtype))};
  TESSERA_CHECK_EQ(array->strides.size(), region.size());
  return {atoms_of(array->owned, dtype), array->strides};
}

ArrayView image_of(const RouteRegion& what) {
  std::vector<IntervalSet> whole;
  for (const Index size : what.shape) whole.emplace_back(Interval{0, size});
  if (elements_per_atom(what.dtype) == 2 && !whole.empty())
    whole.back() = IntervalSet(Interval{0, halved(what.shape.back(), "row length")});
  std::vector<Index> strides = packed_strides(whole, atom_bytes(what.dtype));
  return {std::move(whole), std::move(strides)};
}

}  // namespace

int64_t atom_bytes(DType dtype) {
  return std::max(bits_of(dtype) / 8, 1);
}
int64_t elements_per_atom(DType dtype) {
  return dtype == DType::kF4 ? 2 : 1;
}

std::vector<Index> byte_strides(DType dtype, std::span<const Index> extents, std::span<const Index> strides) {
  const Index per_atom = elements_per_atom(dtype);
  const Index bytes = atom_bytes(dtype);
  std::vector<Index> result(extents.size());
  if (!strides.empty() && strides.size() != extents.size())
    fail(ErrorCode::kInvalidArgument, "{} strides for a tensor of {} dims", strides.size(), extents.size());
  Index step = 1;  // of a contiguous array, in elements
  for (size_t d = extents.size(); d-- > 0;) {
    const bool last = d + 1 == extents.size();
    const Index elements = strides.empty() ? step : strides[d];
    if (last && per_atom == 2) {
      if (elements != 1 && extents[d] > 1)
        fail(ErrorCode::kInvalidArgument, "f4: the last dim's stride is {}, it must be 1", elements);
      result[d] = bytes;
    } else if (per_atom == 2) {
      result[d] = extents[d] > 1 ? halved(elements, "stride") : 0;
    } else if (__builtin_mul_overflow(elements, bytes, &result[d])) {
      fail(ErrorCode::kInvalidArgument, "a stride of {} elements is larger than any memory", elements);
    }
    step *= std::max<Index>(extents[d], 1);
  }
  return result;
}

ByteExtent extent_of(DType dtype, std::span<const Index> extents, std::span<const Index> byte_strides) {
  TESSERA_CHECK_EQ(extents.size(), byte_strides.size());
  ByteExtent extent;
  for (size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] == 0) return {};
    const bool pairs = elements_per_atom(dtype) == 2 && d + 1 == extents.size();
    const Index steps = pairs ? (extents[d] + 1) / 2 - 1 : extents[d] - 1;
    int64_t reach = 0;
    int64_t& side = byte_strides[d] < 0 ? extent.begin : extent.end;
    if (__builtin_mul_overflow(steps, byte_strides[d], &reach) || __builtin_add_overflow(side, reach, &side) ||
        side > INT64_MAX / 4 || side < INT64_MIN / 4)
      fail(ErrorCode::kInvalidArgument, "a dim of {} elements, {} bytes apart, is larger than any memory", extents[d],
           byte_strides[d]);
  }
  extent.end += atom_bytes(dtype);
  return extent;
}

Walk make_walk(const RouteRegion& what, const WalkArrays& arrays, Walk::Order order) {
  if (what.region.empty()) return {};
  const std::vector<IntervalSet> region = atoms_of(what.region, what.dtype);
  const ArrayView src = view_of(arrays.src, what.dtype, region);
  const ArrayView dst = view_of(arrays.dst, arrays.dst_dtype, region);
  const ArrayView image = arrays.image ? image_of(what) : ArrayView{};
  std::vector<std::array<DimView, kArrays>> dims(region.size());
  for (size_t d = 0; d < region.size(); ++d) {
    dims[d][kSource] = {&src.owned[d], src.strides[d]};
    dims[d][kDestination] = {&dst.owned[d], dst.strides[d]};
    if (arrays.image) dims[d][kImage] = {&image.owned[d], image.strides[d]};
  }
  const int64_t bytes = atom_bytes(what.dtype);
  const Offsets steps{bytes, atom_bytes(arrays.dst_dtype), arrays.image ? bytes : 0};
  return Walk(region, dims, steps, order);
}

}  // namespace tessera
