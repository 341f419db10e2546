// How one placement cuts a set of elements along its dim.
#pragma once

#include "tessera/layout.h"

namespace tessera {

// The tensor dim that the placement cuts, if any: Shard, StridedShard and RaggedShard cut one.
std::optional<int> sharded_dim(const Placement& placement);
// The same placement on another dim; a placement that does not cut stays unchanged.
Placement with_dim(Placement placement, int dim);

// The part of `set`, the elements that the axes to the left have left, that `coordinate` of an axis of `axis_size`
// keeps. O(log intervals) plus the intervals of the result, times the split factor of a StridedShard.
IntervalSet part_of(const IntervalSet& set, const Placement& placement, int axis_size, int coordinate);

}  // namespace tessera
