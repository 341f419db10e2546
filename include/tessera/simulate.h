// The reference executor: what a Plan does, in one process, one element after the other. The yardstick for every faster
// executor, and a way to try a layout without launching anything.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "tessera/plan.h"

namespace tessera {

// Local tensors by rank: owned elements in ascending global order, row-major, contiguous, packed.
using LocalArrays = std::map<Rank, std::vector<std::byte>>;

// Moves `sources` (one array for every source rank) along the routes of a whole plan; returns one array for every
// destination rank. Partial sources are reduced first: in ascending rank order, in f32 (f64 for f64; integers wrap in
// their own type), rounded once to the source's dtype; avg divides last, min and max propagate NaN.
// Throws Error(kInvalidArgument) when an array is missing or has the wrong size, Error(kInternal) when the plan does
// not write every destination element once. Pure.
LocalArrays simulate(const Plan& plan, const LocalArrays& sources);

}  // namespace tessera
