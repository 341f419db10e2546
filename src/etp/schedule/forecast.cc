#include "etp/schedule/forecast.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::etp {

std::string to_string(const RankBytes& bytes) {
  return fmt::format(
      "parameters {} + gradients {} + publication {} + replicated {} + gathered {} + gradients in flight {} = {} B",
      bytes.parameters, bytes.gradients, bytes.publication, bytes.replicated, bytes.gathered, bytes.gradients_in_flight,
      bytes.total());
}

RankBytes forecast_rank(const ForecastInput& input) {
  RankBytes bytes{.replicated = input.replicated.bytes * input.replicated.copies, .gathered = input.gathered_bytes};
  int64_t largest = 0;  // gradient
  for (const ForecastWeight& weight : input.weights) {
    const int64_t rows = weight.sharding.rows_of(input.rank).size();
    bytes.parameters += bytes_of(weight.parameter, rows * weight.columns);
    if (rows > 0) bytes.publication += weight.format.publication_bytes(weight.parameter, rows, weight.columns);
    if (!weight.trained) continue;
    bytes.gradients += bytes_of(input.gradient, rows * weight.columns);
    largest = std::max(largest, bytes_of(weight.wgrad, weight.sharding.rows * weight.columns));
  }
  bytes.gradients_in_flight = std::min(input.rounds_in_flight, kMaxRoundsInFlight) * largest;
  return bytes;
}

}  // namespace tessera::etp
