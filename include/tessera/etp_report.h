// What a runtime of Extended Tensor Parallelism tells of itself: tessera/etp.h includes it. Plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::etp {

struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return begin == end; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// What is held now, in bytes, to the byte, and what happened since the runtime was made.
struct RuntimeReport {
  struct Weight {
    std::string name = {};
    RowRange rows = {};
    int64_t version = 0;
    std::string chain = {};
    std::string format = {};
    bool frozen = false;
    int64_t shard_bytes = 0;
    int64_t publication_bytes = 0;
    int64_t master_bytes = 0;    // of a native weight that has a master: its rows, which are the caller's memory
    int64_t gradient_bytes = 0;  // accumulated, where it is the runtime's memory
    int64_t gathered_bytes = 0;  // of buffers that hold it now
  };
  struct Key {
    std::string key = {};  // of buffers that may replace each other
    int64_t bytes = 0;
    int64_t peak_bytes = 0;
  };
  int rank = 0;
  int size = 0;
  std::vector<Weight> weights = {};
  std::vector<Key> keys = {};
  int64_t shard_bytes = 0;
  int64_t publication_bytes = 0;
  int64_t master_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t gathered_bytes = 0;
  int64_t gathered_peak_bytes = 0;
  int64_t mapped_bytes = 0;    // addresses of weights that are mapped; the memory is their owners'
  int64_t captured_bytes = 0;  // of both kinds of buffers: what captures have
  int64_t produced_bytes = 0;  // buffers of [F, K] gradients
  int64_t produced_peak_bytes = 0;
  int64_t replicated_bytes = 0;

  int64_t consumptions = 0;
  int64_t prefetched = 0;  // consumptions that found their weight gathered, or on its way
  int64_t on_demand = 0;
  int64_t in_place = 0;      // consumptions of the shard itself, where the group has one rank
  int64_t mapped = 0;        // consumptions of all owners' memory, which copied nothing
  int64_t mispredicted = 0;  // prefetches that nobody consumed
  int64_t refused = 0;       // prefetches that did not fit cap_bytes
  int64_t over_cap = 0;      // buffers that took more than cap_bytes, for uses at one time that need more
  int64_t bytes_gathered = 0;
  int64_t rounds = 0;         // produced here
  int64_t folds = 0;          // into rows of this rank
  int64_t left_out = 0;       // gradients that another rank did not give for a round
  int64_t pool_grown = 0;     // gradient buffers beyond three of a key
  int64_t room_waits = 0;     // producers that waited for one
  int64_t publications = 0;   // of weights
  int64_t max_exchanges = 0;  // for amaxes
  int64_t replays = 0;        // of captures
  int64_t drains = 0;
  int64_t updates = 0;
  int64_t writes = 0;          // between updates
  double exposed_seconds = 0;  // acquire() waited
  double write_seconds = 0;    // begin_write() waited, for other ranks and their reads
};

// A stream on which weights and gradients move beside the computation. It is made at its first use.
struct StreamInfo {
  std::string name = {};
  std::string chain = {};
  bool gathers = true;  // else it reduces
  bool idle = true;     // what it was given has ended
};

// Bytes that a rank will hold at its peak, before the first step.
struct RuntimeForecast {
  int64_t parameters = 0;
  int64_t publication = 0;
  int64_t gradients = 0;
  int64_t gathered = 0;
  int64_t produced = 0;
  int64_t replicated = 0;
  int64_t masters = 0;  // of native weights: the caller's memory, and no part of the total
  int64_t total() const { return parameters + publication + gradients + gathered + produced + replicated; }
  friend bool operator==(const RuntimeForecast&, const RuntimeForecast&) = default;
};

}  // namespace tessera::etp
