// Explains a wait that may be in vain: where the store shows the missing ranks instead, and for whom they wait.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "peer/identity.h"
#include "tessera/layout.h"
#include "tessera/store.h"

namespace tessera::bus {

// Ranks of one job that a rank waits for.
struct AwaitedRanks {
  std::string pair;
  std::string batch = {};  // that they have not registered; empty: they have not joined the pair
  std::string job;
  std::vector<Rank> ranks = {};  // that have not registered the batch; not used for a pair
};

// Returns clauses for the message of the wait, such as "job engine is here, in pair wieghts", joined by "; ". Empty if
// the store shows nothing of the kind, or does not answer within `timeout`: it never throws for what the store does or
// holds. Records of ranks that have not joined `awaited.pair` are untrusted: names that no process of this release may
// have are left out.
std::string wait_hint(Store& store, const Identity& self, const std::vector<AwaitedRanks>& awaited, Duration timeout);

}  // namespace tessera::bus
