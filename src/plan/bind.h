// Checks of the planner's arguments.
#pragma once

#include "tessera/plan.h"

namespace tessera::plan {

struct BoundLayouts {
  Layout src;
  Layout dst;
};

// Both layouts bound to the shape. Throws Error(kInvalidArgument) if no plan is possible.
BoundLayouts bind(const TensorMeta& meta, const Layout& src, const Layout& dst);

}  // namespace tessera::plan
