// One random redistribution, planned and then judged element by element by the brute force of layout/brute_force.h.
#pragma once

#include <string>

#include "layout/random_layout.h"
#include "tessera/plan.h"

namespace tessera::plan {

struct Case {
  TensorMeta meta;
  Layout src;
  Layout dst;
  PlanOptions options;

  std::string text() const;
};

Case random_case(RandomLayouts& with_partial, RandomLayouts& without_partial);

// True when the case could be planned; a cut inside a byte is the one thing that may not. Failures are gtest's.
bool check_case(const Case& c);

}  // namespace tessera::plan
