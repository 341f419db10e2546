// How many bytes a rank will hold of a model that is not sharded yet. No memory is made, and no other rank is asked.
// Pure functions; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "etp/parameter.h"
#include "etp/schedule/forecast.h"
#include "tessera/etp.h"

namespace tessera::etp {

// What a runtime would be told of a model, in this order.
struct ModelToShard {
  struct Weight {
    WeightSpec spec;
    int count = 1;  // above 1: a stack of so many, as add_stack() takes it
  };
  std::vector<Weight> weights = {};
  std::vector<std::vector<size_t>> lists = {};  // of experts, as add_experts() takes them: places in `weights`
  std::vector<int64_t> replicated = {};         // bytes of each tensor that add_replicated() takes
};

// What Runtime::forecast() says on that rank of a group of `ranks`, before its first step. Throws
// Error(kInvalidArgument) as add() and Runtime() do, and for a rank that the group does not have.
RuntimeForecast forecast_model(const ModelToShard& model, int rank, int ranks, const RuntimeOptions& options);

// A weight as forecast_rank() takes it.
ForecastWeight forecast_weight(const Parameter& parameter);

}  // namespace tessera::etp
