// The final report of `tessera send` and `tessera recv`, in words or in JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/bus.h"

namespace tessera::tools {

// One version that was transferred.
struct Transfer {
  int64_t version = 0;
  Progress progress;  // this rank's bytes
  std::vector<TensorDigest> digests;
  std::string file;       // written by --out; empty: none
  bool verified = false;  // by --verify
  // This rank's regions that travelled as deltas, the bytes of the deltas, and their size in full.
  int64_t delta_routes = 0;
  int64_t delta_bytes = 0;
  int64_t delta_full_bytes = 0;
};

struct TransferReport {
  std::string command;  // "send" or "recv"
  BusOptions bus;
  PairOptions pair;
  BatchStats stats;
  std::vector<Transfer> transfers;  // at least one
};

// Sets `stats` to those of the batch now, and the transfer's deltas to the difference since the last call.
void note_stats(const BatchStats& now, TransferReport& report, Transfer& transfer);

// "recv inference/0: version 3: 104 tensors, 45.2 MB here (90.4 MB in all, lower bound 90.4 MB), 0.012 s, 3.77 GB/s".
std::string describe(const TransferReport& report, const Transfer& transfer);

// "quantised: 12.4 MB of 44.0 MB as bf16 (0.282); the whole batch: 25.1 MB (0.310)": this rank's quantised tensors, and
// the planned transfer of the whole batch, including tensors that are not quantised. Empty if nothing travels
// quantised.
std::string describe_quantised(const BatchStats& stats);

// One JSON object. `bytes_moved` and `bytes_lower_bound` are for one transfer of the whole batch, over all ranks;
// `version`, `seconds`, `gigabytes_per_second` (of this rank) and `digests` are for the last transfer. `quantized`
// holds figures from BatchStats; its `bf16_ratio` is for this rank, `batch_bf16_ratio` for all.
std::string to_json(const TransferReport& report);

}  // namespace tessera::tools
