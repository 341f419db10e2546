// What `tessera send` and `tessera recv` say at the end, in words or in JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/bus.h"

namespace tessera::tools {

// One version that has gone over.
struct Transfer {
  int64_t version = 0;
  Progress progress;  // this rank's bytes
  std::vector<TensorDigest> digests;
  std::string file;       // written by --out; empty: none
  bool verified = false;  // by --verify
  // Regions of this rank's that went as deltas, their bytes, and what they take in full.
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

// Makes `stats` those of the batch now, and the transfer's deltas what has come since.
void note_stats(const BatchStats& now, TransferReport& report, Transfer& transfer);

// "recv inference/0: version 3: 104 tensors, 45.2 MB here (90.4 MB in all, lower bound 90.4 MB), 0.012 s, 3.77 GB/s".
std::string describe(const TransferReport& report, const Transfer& transfer);

// "quantised: 12.4 MB of 44.0 MB as bf16 (0.282); the whole batch: 25.1 MB (0.310)": this rank's quantised tensors, and
// the batch of all ranks as planned, whose other tensors count as they are. Empty where nothing travels quantised.
std::string describe_quantised(const BatchStats& stats);

// One JSON object. `bytes_moved` and `bytes_lower_bound` are those of the whole batch, all ranks, one transfer;
// `version`, `seconds`, `gigabytes_per_second` (of this rank) and `digests` those of the last. `quantized` holds
// what BatchStats says of it; its `bf16_ratio` is of this rank, `batch_bf16_ratio` of all.
std::string to_json(const TransferReport& report);

}  // namespace tessera::tools
