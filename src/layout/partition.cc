#include "layout/partition.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera {
namespace {

// torch.chunk: positions of the `index`-th of `count` chunks of `size` positions, each ceil(size / count) long until
// nothing is left. With size and count up to kMaxElements nothing here overflows.
Interval chunk(Index size, Index count, Index index) {
  const Index length = size / count + (size % count != 0 ? 1 : 0);
  const Index first = std::min(size, length * index);
  return {first, std::min(size, first + length)};
}

IntervalSet strided_part(const IntervalSet& set, Index split_factor, int axis_size, int coordinate) {
  std::vector<Interval> kept;
  kept.reserve(static_cast<size_t>(std::min(split_factor, set.size())));
  for (Index i = 0; i < split_factor; ++i) {
    const Interval piece = chunk(set.size(), split_factor, i);
    if (piece.size() == 0) break;
    const Interval mine = chunk(piece.size(), axis_size, coordinate);
    set.append_slice(piece.begin + mine.begin, piece.begin + mine.end, kept);
  }
  return IntervalSet::of_sorted(kept);
}

}  // namespace

std::optional<int> sharded_dim(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim;
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim;
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) return ragged->dim;
  return std::nullopt;
}

Placement with_dim(Placement placement, int dim) {
  if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = dim;
  if (auto* strided = std::get_if<StridedShard>(&placement)) strided->dim = dim;
  if (auto* ragged = std::get_if<RaggedShard>(&placement)) ragged->dim = dim;
  return placement;
}

IntervalSet part_of(const IntervalSet& set, const Placement& placement, int axis_size, int coordinate) {
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    return strided_part(set, strided->split_factor, axis_size, coordinate);
  }
  if (const auto* ragged = std::get_if<RaggedShard>(&placement)) {
    const auto c = static_cast<size_t>(coordinate);
    return set.slice(ragged->bounds[c], ragged->bounds[c + 1]);
  }
  const Interval mine = chunk(set.size(), axis_size, coordinate);
  return set.slice(mine.begin, mine.end);
}

DimPartition partition_dim(const Layout& layout, Index dim_size, int dim) {
  DimPartition partition;
  partition.parts.emplace_back(Interval{0, dim_size});
  for (int a = 0; a < layout.mesh().ndim(); ++a) {
    const auto axis = static_cast<size_t>(a);
    const Placement& placement = layout.placements()[axis];
    if (sharded_dim(placement) != dim) continue;
    const int axis_size = layout.mesh().axes()[axis].size;
    std::vector<IntervalSet> finer;
    finer.reserve(partition.parts.size() * static_cast<size_t>(axis_size));
    for (const IntervalSet& part : partition.parts) {
      for (int c = 0; c < axis_size; ++c) finer.push_back(part_of(part, placement, axis_size, c));
    }
    partition.axes.push_back(a);
    partition.parts = std::move(finer);
  }
  return partition;
}

}  // namespace tessera
