// How many bytes a rank will hold, told before the first step. Values and pure functions; thread-safe.
//
//   parameters W + gradients (4 B a value by default) + publication (0 in place, else planes) + replicated parameters,
//   three- or fourfold + gathered (what the pools of the plan hold) + min(rounds in flight, 3) gradients of the largest
//   weight, [F, K]
//
// The optimiser's state is its own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "etp/schedule/sharding.h"
#include "etp/schedule/weight_format.h"

namespace tessera::etp {

struct RankBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t publication = 0;
  int64_t replicated = 0;
  int64_t gathered = 0;
  int64_t gradients_in_flight = 0;

  int64_t total() const { return parameters + gradients + publication + replicated + gathered + gradients_in_flight; }
  friend bool operator==(const RankBytes&, const RankBytes&) = default;
};

// "parameters 1048576 + gradients ... = 7340032 B"
std::string to_string(const RankBytes& bytes);

struct ForecastWeight {
  Sharding sharding;
  int64_t columns = 0;
  DType parameter = DType::kBF16;
  WeightFormat format{};
  DType wgrad = DType::kF32;  // of what a backward produces, for all rows
  bool trained = true;        // has a gradient
};

// Parameters that every rank has whole: norms, biases.
struct ReplicatedParameters {
  int64_t bytes = 0;
  // Copies of that size: the parameter, its gradient and the bucket in which it is folded; a fourth where the gradient
  // is accumulated in another dtype.
  int copies = 3;
};

struct ForecastInput {
  std::span<const ForecastWeight> weights;
  int rank = 0;
  DType gradient = DType::kF32;  // of a rank's rows
  int rounds_in_flight = 2;      // gradients that are produced and not folded yet
  ReplicatedParameters replicated{};
  int64_t gathered_bytes = 0;  // PrefetchPlan::pool_bytes()
};
inline constexpr int kMaxRoundsInFlight = 3;  // that take memory of their own

RankBytes forecast_rank(const ForecastInput& input);

}  // namespace tessera::etp
