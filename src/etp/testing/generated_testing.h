// Random models and training loops for the tests of a runtime, and what an unsharded program computes for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/record/check.h"
#include "tessera/etp.h"

namespace tessera::etp {

// A model of layers, each of which uses a weight or a list of experts, and how it is trained. From a seed.
struct GeneratedModel {
  struct Layer {
    std::vector<uint32_t> weights;  // several: experts
    bool stacked = false;           // which are one stack
    bool recompute = false;         // gathered again before its backward
    bool gathers_backward = true;
  };

  uint64_t seed = 0;
  int ranks = 1;
  int steps = 2;
  int micro_batches = 1;
  bool drain_each = true;  // after each micro-batch; else once a step
  bool evaluates = false;  // a forward pass without gradients between steps
  bool skips = false;      // ranks leave out experts, and backwards end early, at random
  bool async_compute = false;
  bool maps = false;      // weights that can be, unless they are computed with asynchronously
  bool captures = false;  // rows of graphed layers
  int captures_live = 1;  // steps; then they are captured again
  std::vector<WeightSpec> weights;
  std::vector<Layer> layers;
  RuntimeOptions options;

  static GeneratedModel of(uint64_t seed);
  std::string to_string() const;
  // Whether a rank leaves a layer out.
  bool skipped(int rank, int step, int micro_batch, size_t layer) const;
  // The layer at which a rank's backward ends.
  size_t backward_ends(int rank, int step, int micro_batch) const;
  // All layers in order; captured ones of a row become one part of a step.
  struct Row {
    size_t begin = 0;
    size_t end = 0;
    bool captured = false;
  };
  std::vector<Row> rows() const;
};

// What every rank computes and holds at the end, as bits.
struct TrainingResult {
  std::vector<std::vector<float>> weights;    // [F, K] of each
  std::vector<std::vector<float>> gradients;  // accumulated in the last step
  std::vector<std::vector<float>> outputs;    // of each rank: the model's, at each micro-batch
  // Of each rank; the unsharded program has none:
  std::vector<std::vector<std::vector<Added>>> added{};  // at each drain
  std::vector<int64_t> replays{};                        // of captures
  std::vector<int64_t> mapped{};                         // uses
};

// The unsharded program, in plain loops over full weights.
TrainingResult train_unsharded(const GeneratedModel& model);

// One rank's part; writes its rows, outputs and rounds to `result`, which has room for all ranks.
void train_rank(const GeneratedModel& model, ShardGroup group, TrainingResult& result);

// All ranks, as fibers of a virtual world whose schedule the number draws: 0 as late as possible, 1 as early as
// possible, others random. Returns the error's text; empty if there is none.
std::string train_in_schedule(const GeneratedModel& model, uint64_t schedule, TrainingResult& result);

// The same, recorded, and what the checker says of the logs of all ranks. An error cuts them off, which is a fault.
struct CheckedRun {
  std::string error;
  device::CheckReport report;

  // What is wrong first, in words; empty if nothing is.
  std::string finding() const;
};
CheckedRun train_checked(const GeneratedModel& model, uint64_t schedule, TrainingResult& result);

// The first difference, in words; empty if there is none.
std::string difference(const TrainingResult& expected, const TrainingResult& found);

// An empty result with room for all ranks.
TrainingResult room_for(const GeneratedModel& model);

}  // namespace tessera::etp
