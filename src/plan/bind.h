// What the planner asks of its arguments before it begins.
#pragma once

#include "tessera/plan.h"

namespace tessera::plan {

struct BoundLayouts {
  Layout src;
  Layout dst;
};

// Both layouts bound to the shape. Throws Error(kInvalidArgument) for what no plan can be made of.
BoundLayouts bind(const TensorMeta& meta, const Layout& src, const Layout& dst);

}  // namespace tessera::plan
