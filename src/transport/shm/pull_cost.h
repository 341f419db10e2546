// What reading a peer's private memory costs on this machine, each way.
#pragma once

#include <cstdint>

#include "exec/pull/compiler.h"

namespace tessera {

// Processor time of both sides together: proportional to the bytes, and to the runs in which they lie at the source.
struct PathCost {
  double byte = 0;   // seconds
  double piece = 0;  // seconds
  double seconds(int64_t bytes, int64_t pieces) const {
    return byte * static_cast<double>(bytes) + piece * static_cast<double>(pieces);
  }
};

struct PullCosts {
  PathCost readv;  // process_vm_readv
  PathCost ring;   // packed by the sender, unpacked by the receiver
};

// Measures on this process' own memory; takes some 10 ms. All 0 in `readv` if the call is not permitted.
PullCosts measure_pull_costs();
// The same, measured once a process. Thread-safe.
const PullCosts& pull_costs();

// Which way is cheaper. The ring has to win clearly: it takes the sender's time too.
PullPath cheaper_private_path(const PullCosts& costs, int64_t bytes, int64_t pieces);

}  // namespace tessera
