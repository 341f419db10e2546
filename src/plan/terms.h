// The traffic of reductions: the terms that owners read from their peers.
#pragma once

#include "tessera/plan.h"

namespace tessera::plan {

// Calls visit(peer, reduction, bytes) for every term that is not the owner's own.
template <typename Visit>
void for_each_term(const Plan& plan, Visit visit) {
  for (const Reduction& reduction : plan.reductions) {
    const int64_t bytes = bytes_of(plan.meta.dtype, reduction.region.size());
    for (const Rank peer : plan.peers(reduction))
      if (peer != reduction.owner) visit(peer, reduction, bytes);
  }
}

}  // namespace tessera::plan
