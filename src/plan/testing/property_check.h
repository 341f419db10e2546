// One random redistribution, planned and checked element by element with the brute force of layout/brute_force.h.
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

// True if the case could be planned; only a cut inside a byte may prevent it. Failures are reported to gtest.
bool check_case(const Case& c);

}  // namespace tessera::plan
