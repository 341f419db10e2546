// The cost of reading a peer's private memory on this machine, for each kind of access.
#pragma once

#include "transport/connection.h"

namespace tessera {

struct PullCosts {
  PathCost readv;  // process_vm_readv
  PathCost ring;   // packed by the sender, unpacked by the receiver
};

// Measures on this process's own memory; takes about 10 ms. `readv` is all 0 if the call is not permitted.
PullCosts measure_pull_costs();
// The same, measured once in each process. Thread-safe.
const PullCosts& pull_costs();

}  // namespace tessera
