// Turns the cells of a CellWalk into a Plan.
#pragma once

#include <optional>
#include <unordered_map>

#include "plan/cell_walk.h"

namespace tessera::plan {

// The plan of one tensor or, with `rank`, that rank's part of it.
Plan build_plan(const Kind& kind, const HostMap& hosts, const PlanOptions& options, int rotation,
                std::optional<Rank> rank = {});

}  // namespace tessera::plan
