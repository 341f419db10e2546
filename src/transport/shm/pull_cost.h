// What reading a peer's private memory costs on this machine, each way.
#pragma once

#include "transport/connection.h"

namespace tessera {

struct PullCosts {
  PathCost readv;  // process_vm_readv
  PathCost ring;   // packed by the sender, unpacked by the receiver
};

// Measures on this process' own memory; takes some 10 ms. All 0 in `readv` if the call is not permitted.
PullCosts measure_pull_costs();
// The same, measured once a process. Thread-safe.
const PullCosts& pull_costs();

}  // namespace tessera
