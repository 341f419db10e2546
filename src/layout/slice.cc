// Slices of tensors: the layout of a part of a sharded tensor.
#include <algorithm>

#include "base/fail.h"
#include "layout/partition.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

std::string to_string(const Slice& slice) {
  if (slice.dropped) return fmt::format("{}", slice.begin);
  return slice.step == 1 ? fmt::format("{}:{}", slice.begin, slice.end)
                         : fmt::format("{}:{}:{}", slice.begin, slice.end, slice.step);
}

// The starts of all parts of a dim that one axis cuts contiguously, and the end of the last one. `what` is the request,
// for messages.
std::vector<Index> bounds_of(const DimPartition& partition, std::string_view what) {
  std::vector<Index> bounds{0};
  for (const IntervalSet& part : partition.parts) {
    const bool follows = part.empty() || (part.intervals().size() == 1 && part.intervals()[0].begin == bounds.back());
    if (!follows) fail(ErrorCode::kUnimplemented, "{}, not contiguously: such a slice has no layout"_message, what);
    bounds.push_back(part.empty() ? bounds.back() : part.intervals()[0].end);
  }
  return bounds;
}

// The submesh of the ranks at `fixed` coordinates along some axes.
Mesh submesh(const Mesh& mesh, std::span<const std::optional<int>> fixed) {
  std::vector<Axis> axes;
  for (size_t axis = 0; axis < fixed.size(); ++axis)
    if (!fixed[axis]) axes.push_back(mesh.axes()[axis]);
  if (axes.empty()) axes.push_back({"", 1});
  std::vector<Rank> ranks;
  for (int position = 0; position < mesh.size(); ++position) {
    const std::vector<int> at = mesh.coordinate(position);
    bool inside = true;
    for (size_t axis = 0; axis < fixed.size(); ++axis) inside = inside && fixed[axis].value_or(at[axis]) == at[axis];
    if (inside) ranks.push_back(mesh.ranks()[static_cast<size_t>(position)]);
  }
  return Mesh(std::move(axes), std::move(ranks));
}

}  // namespace

std::string to_string(std::span<const Slice> slices) {
  std::string text;
  for (const Slice& slice : slices) text += (text.empty() ? "" : ", ") + to_string(slice);
  return text;
}

Shape sliced_shape(std::span<const Index> shape, std::span<const Slice> slices) {
  if (slices.size() != shape.size())
    fail(ErrorCode::kInvalidArgument, "slice [{}] has {} dims, the tensor ({}) has {}"_message, to_string(slices),
         slices.size(), to_string_shape(shape), shape.size());
  Shape sliced;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const Slice& slice = slices[dim];
    const bool upwards = 0 <= slice.begin && slice.begin <= slice.end && slice.end <= shape[dim] && slice.step >= 1 &&
                         slice.step <= kMaxElements;
    const bool one = slice.begin < shape[dim] && slice.end == slice.begin + 1 && slice.step == 1;
    if (!upwards || (slice.dropped && !one))
      fail(ErrorCode::kInvalidArgument, "slice [{}]: {} is not within dim {}, of {}"_message, to_string(slices),
           to_string(slice), dim, shape[dim]);
    if (!slice.dropped) sliced.push_back(slice.size());
  }
  return sliced;
}

Layout sliced_layout(const Layout& given, std::span<const Index> shape, std::span<const Slice> slices) {
  sliced_shape(shape, slices);
  const Layout layout = given.bind(shape);
  std::vector<Placement> placements(layout.placements().begin(), layout.placements().end());
  std::vector<std::optional<int>> fixed(placements.size());  // the coordinate of the selected element along the axis
  int kept = 0;                                              // dims
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const Slice& slice = slices[dim];
    const DimPartition partition = partition_dim(layout, shape[dim], static_cast<int>(dim));
    if (slice.dropped) {
      const auto owner =
          std::ranges::find_if(partition.parts, [&](const auto& part) { return part.contains(slice.begin); });
      auto place = static_cast<int>(owner - partition.parts.begin());
      for (size_t i = partition.axes.size(); i-- > 0;) {
        const auto axis = static_cast<size_t>(partition.axes[i]);
        const int size = layout.mesh().axes()[axis].size;
        fixed[axis] = place % size;
        place /= size;
      }
      continue;
    }
    for (const int axis : partition.axes)
      placements[static_cast<size_t>(axis)] = with_dim(placements[static_cast<size_t>(axis)], kept);
    if (slice.size() != shape[dim] && !partition.axes.empty()) {
      const std::string what =
          fmt::format("slice [{}] cuts dim {}, which {} shards"_message, to_string(slices), dim, layout.to_string());
      if (slice.step != 1)
        fail(ErrorCode::kUnimplemented, "{}: of a sharded dim, take contiguous slices"_message, what);
      if (partition.axes.size() > 1)
        fail(ErrorCode::kUnimplemented, "{} by several axes: such a slice has no layout"_message, what);
      std::vector<Index> bounds = bounds_of(partition, what);
      for (Index& bound : bounds) bound = std::clamp(bound, slice.begin, slice.end) - slice.begin;
      placements[static_cast<size_t>(partition.axes[0])] = RaggedShard{kept, std::move(bounds)};
    }
    ++kept;
  }
  std::vector<Placement> left;
  for (size_t axis = 0; axis < fixed.size(); ++axis)
    if (!fixed[axis]) left.push_back(placements[axis]);
  if (left.empty()) left.emplace_back(Replicate{});
  const bool whole = std::ranges::none_of(fixed, [](const auto& place) { return place.has_value(); });
  return {whole ? layout.mesh() : submesh(layout.mesh(), fixed), std::move(left)};
}

std::vector<Slice> local_slices(const Layout& layout, std::span<const Index> shape, std::span<const Slice> slices,
                                Rank rank) {
  const Region owned = layout.owned(shape, rank);
  std::vector<Slice> local;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const IntervalSet& held = owned.dim(static_cast<int>(dim));
    Slice slice = slices[dim];
    // With a step, no axis shards the dim, so it stays the same.
    if (slice.step == 1) {
      slice.begin = held.position_of(slice.begin);
      slice.end = slice.dropped ? slice.begin + 1 : held.position_of(slice.end);
    }
    local.push_back(slice);
  }
  return local;
}

}  // namespace tessera
