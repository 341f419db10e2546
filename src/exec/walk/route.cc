#include "exec/walk/route.h"

#include <algorithm>

#include "base/fail.h"
#include "exec/walk/route_walk.h"

namespace tessera {
namespace {

Index halved(Index value, const char* what) {
  if (value % 2 != 0) fail(ErrorCode::kInvalidArgument, "f4: {} {} is odd: it lies inside a byte"_message, what, value);
  return value / 2;
}

// `set` of rows of `row` f4 elements, in pairs of elements.
IntervalSet pairs_of(const IntervalSet& set, Index row) {
  std::vector<Interval> intervals(set.intervals().begin(), set.intervals().end());
  for (Interval& interval : intervals)
    interval = {halved(interval.begin * row, "cut"), halved(interval.end * row, "cut")};
  return IntervalSet::of_sorted(intervals);
}

// Two f4 elements share a byte, so one dim counts in pairs: the last one of even size. All dims below it have odd
// sizes; together they are one row of it, which may not be cut.
size_t paired_dim(std::span<const Index> extents) {
  size_t d = extents.size() - 1;
  while (d > 0 && extents[d] % 2 != 0) --d;
  return d;
}

Index product_behind(std::span<const Index> extents, size_t dim) {
  Index product = 1;
  for (size_t d = dim + 1; d < extents.size(); ++d) product *= extents[d];
  return product;
}

// A part of a tensor of `shape`, in atoms. For f4, the dims below the paired one are dropped.
std::vector<IntervalSet> atoms_of(std::span<const IntervalSet> part, std::span<const Index> shape, DType dtype) {
  std::vector<IntervalSet> dims(part.begin(), part.end());
  if (elements_per_atom(dtype) == 1) return dims;
  if (shape.empty()) fail(ErrorCode::kInvalidArgument, "f4: a scalar is half a byte"_message);
  const size_t paired = paired_dim(shape);
  for (size_t d = paired + 1; d < shape.size(); ++d)
    if (dims[d].size() != shape[d])
      fail(ErrorCode::kInvalidArgument, "f4: dim {} of odd size {} is cut inside a byte"_message, d, shape[d]);
  dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(paired) + 1, dims.end());
  dims.back() = pairs_of(dims.back(), product_behind(shape, paired));
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

ArrayView view_of(const LocalArray* array, DType dtype, const RouteRegion& what,
                  const std::vector<IntervalSet>& region) {
  if (array == nullptr) return {region, packed_strides(region, atom_bytes(dtype))};
  TESSERA_CHECK_EQ(array->strides.size(), what.shape.size());
  return {atoms_of(array->owned.dims(), what.shape, dtype), array->strides};
}

ArrayView image_of(const RouteRegion& what) {
  const std::vector<IntervalSet> whole = atoms_of(Region::full(what.shape).dims(), what.shape, what.dtype);
  return {whole, packed_strides(whole, atom_bytes(what.dtype))};
}

}  // namespace

int64_t atom_bytes(DType dtype) {
  return std::max(bits_of(dtype) / 8, 1);
}
int64_t elements_per_atom(DType dtype) {
  return dtype == DType::kF4 ? 2 : 1;
}

ImageRange image_range(const RouteRegion& what) {
  if (what.region.empty()) return {};
  uint64_t first = 0, last = 0;  // elements
  for (size_t d = 0; d < what.shape.size(); ++d) {
    const std::span<const Interval> intervals = what.region.dim(static_cast<int>(d)).intervals();
    const auto extent = static_cast<uint64_t>(what.shape[d]);
    first = first * extent + static_cast<uint64_t>(intervals.front().begin);
    last = last * extent + static_cast<uint64_t>(intervals.back().end - 1);
  }
  const auto per_atom = static_cast<uint64_t>(elements_per_atom(what.dtype));
  const auto bytes = static_cast<uint64_t>(atom_bytes(what.dtype));
  return {.begin = first / per_atom * bytes, .end = (last / per_atom + 1) * bytes};
}

std::vector<Index> byte_strides(DType dtype, std::span<const Index> extents, std::span<const Index> strides) {
  const Index per_atom = elements_per_atom(dtype);
  const Index bytes = atom_bytes(dtype);
  std::vector<Index> result(extents.size());
  if (!strides.empty() && strides.size() != extents.size())
    fail(ErrorCode::kInvalidArgument, "{} strides for a tensor of {} dims"_message, strides.size(), extents.size());
  const bool pairs = per_atom == 2 && !extents.empty();
  const size_t paired = pairs ? paired_dim(extents) : 0;
  if (pairs && extents[paired] % 2 != 0)
    fail(ErrorCode::kInvalidArgument, "f4: {} elements end in the middle of a byte"_message,
         product_behind(extents, paired) * extents[paired]);
  Index step = 1;  // of a contiguous array, in elements
  for (size_t d = extents.size(); d-- > 0;) {
    const Index elements = strides.empty() ? step : strides[d];
    if (pairs && d >= paired) {
      if (elements != step && extents[d] > 1)
        fail(ErrorCode::kInvalidArgument, "f4: the stride of dim {} is {}, it must be {}"_message, d, elements, step);
      result[d] = d == paired ? bytes : 0;
    } else if (pairs) {
      result[d] = extents[d] > 1 ? halved(elements, "stride") : 0;
    } else if (__builtin_mul_overflow(elements, bytes, &result[d])) {
      fail(ErrorCode::kInvalidArgument, "a stride of {} elements is larger than any memory"_message, elements);
    }
    step *= std::max<Index>(extents[d], 1);
  }
  return result;
}

std::vector<MemoryDim> memory_dims(DType dtype, std::span<const Index> extents, std::span<const Index> byte_strides) {
  TESSERA_CHECK_EQ(extents.size(), byte_strides.size());
  std::vector<MemoryDim> dims;
  dims.reserve(extents.size());
  for (size_t d = 0; d < extents.size(); ++d) dims.push_back({extents[d], byte_strides[d]});
  if (elements_per_atom(dtype) == 1 || dims.empty()) return dims;
  const size_t paired = paired_dim(extents);
  dims.resize(paired + 1);
  dims.back().count = dims.back().count * product_behind(extents, paired) / 2;
  return dims;
}

ByteExtent extent_of(DType dtype, std::span<const Index> extents, std::span<const Index> byte_strides) {
  ByteExtent extent;
  for (const auto& [count, stride] : memory_dims(dtype, extents, byte_strides)) {
    if (count == 0) return {};
    int64_t reach = 0;
    int64_t& side = stride < 0 ? extent.begin : extent.end;
    if (__builtin_mul_overflow(count - 1, stride, &reach) || __builtin_add_overflow(side, reach, &side) ||
        side > INT64_MAX / 4 || side < INT64_MIN / 4)
      fail(ErrorCode::kInvalidArgument, "{} elements, {} bytes apart, are larger than any memory"_message, count,
           stride);
  }
  extent.end += atom_bytes(dtype);
  return extent;
}

Walk make_walk(const RouteRegion& what, const WalkArrays& arrays, Walk::Order order) {
  if (what.region.empty()) return {};
  const std::vector<IntervalSet> region = atoms_of(what.region.dims(), what.shape, what.dtype);
  const ArrayView src = view_of(arrays.src, what.dtype, what, region);
  const ArrayView dst = view_of(arrays.dst, arrays.dst_dtype, what, region);
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
