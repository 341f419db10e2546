// How many bytes a rank will hold, told before the first step. Values and pure functions; thread-safe.
//
//   parameters W + gradients (4 B a value by default) + publication (0 in place, else planes) + replicated + gathered
//   (what the pools of the plan hold) + produced: gradients [F, K] of rounds that are not folded yet, of each size as
//   many as there are weights of it, at most kRoundsInFlight or the experts of a list, which are produced together
//
// The optimiser's state is its own.
#pragma once

#include <cstdint>
#include <span>

#include "etp/schedule/sharding.h"
#include "etp/schedule/weight_format.h"
#include "tessera/etp.h"

namespace tessera::etp {

// Gradient buffers of a size, before a producer waits or their pool grows.
inline constexpr int kRoundsInFlight = 3;

struct ForecastWeight {
  Sharding sharding;
  int64_t columns = 0;
  DType parameter = DType::kBF16;
  WeightFormat format{};
  DType wgrad = DType::kF32;        // of what a backward produces, for all rows
  DType accumulated = DType::kF32;  // of the gradient of a rank's rows
  bool trained = true;              // has a gradient
  bool native = false;              // its planes are the parameter, and rows of that dtype its master
  bool planes_only = false;         // native, without a master
  bool lent_gradient = false;       // the gradient of its rows lies in somebody else's memory
  uint32_t experts = 0;             // its list of experts, from 1; 0: none
};

struct ForecastInput {
  std::span<const ForecastWeight> weights;
  int rank = 0;
  int64_t replicated_bytes = 0;
  int64_t gathered_bytes = 0;  // PrefetchPlan::pool_bytes()
};

RuntimeForecast forecast_rank(const ForecastInput& input);

}  // namespace tessera::etp
