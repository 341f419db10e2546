#include "etp/schedule/forecast.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera::etp {
namespace {

int64_t produced_bytes(std::span<const ForecastWeight> weights) {
  struct Size {
    int64_t weights = 0;
    int64_t together = 0;  // of one list of experts
  };
  std::map<int64_t, Size> sizes;
  std::map<std::pair<uint32_t, int64_t>, int64_t> lists;
  for (const ForecastWeight& weight : weights) {
    if (!weight.trained) continue;
    const int64_t bytes = bytes_of(weight.wgrad, weight.sharding.rows * weight.columns);
    Size& size = sizes[bytes];
    ++size.weights;
    if (weight.experts != 0) size.together = std::max(size.together, ++lists[{weight.experts, bytes}]);
  }
  int64_t sum = 0;
  for (const auto& [bytes, size] : sizes)
    sum += bytes * std::max(std::min<int64_t>(size.weights, kRoundsInFlight), size.together);
  return sum;
}

}  // namespace

RuntimeForecast forecast_rank(const ForecastInput& input) {
  RuntimeForecast bytes{.gathered = input.gathered_bytes,
                        .produced = produced_bytes(input.weights),
                        .replicated = input.replicated_bytes};
  for (const ForecastWeight& weight : input.weights) {
    const int64_t rows = weight.sharding.rows_of(input.rank).size();
    if (rows == 0) continue;
    const int64_t elements = rows * weight.columns;
    if (!weight.planes_only) (weight.native ? bytes.masters : bytes.parameters) += bytes_of(weight.parameter, elements);
    bytes.publication += weight.format.publication_bytes(weight.parameter, rows, weight.columns);
    if (weight.trained && !weight.lent_gradient) bytes.gradients += bytes_of(weight.accumulated, elements);
  }
  return bytes;
}

}  // namespace tessera::etp
