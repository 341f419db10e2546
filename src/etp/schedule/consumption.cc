#include "etp/schedule/consumption.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::etp {

std::string_view to_string(Phase phase) {
  constexpr std::array<std::string_view, 3> kNames{"forward", "backward", "recompute"};
  return kNames.at(static_cast<size_t>(phase));
}

int64_t GatherCost::bytes(Plane plane) const {
  int64_t sum = 0;
  for (const GatherBuffer& buffer : buffers(plane)) sum += buffer.bytes;
  return sum;
}

void check_options(const PrefetchOptions& options) {
  for (const auto& [name, distance] :
       {std::pair("distance", options.distance), std::pair("expert_distance", options.expert_distance)})
    if (distance < 0 || distance > kMaxDistance)
      fail(ErrorCode::kInvalidArgument, "{} is {}: give 0 (no prefetch) to {} uses"_message, name, distance,
           kMaxDistance);
  if (options.cap_bytes && *options.cap_bytes < 0)
    fail(ErrorCode::kInvalidArgument, "cap_bytes is {}: give 0 or more, or leave it out"_message, *options.cap_bytes);
}

std::vector<Consumption> expected_step(const ExpectedUses& uses) {
  TESSERA_CHECK_EQ(uses.names.size(), uses.costs.size());
  const auto count = static_cast<uint32_t>(uses.costs.size());
  std::vector<Consumption> step;
  for (int position = 0; position < uses.micro_batches; ++position) {
    const auto micro_batch = static_cast<uint32_t>(position);
    for (uint32_t weight = 0; weight < count; ++weight)
      step.push_back({.weight = weight, .phase = Phase::kForward, .micro_batch = micro_batch});
    if (!uses.backward) continue;
    for (uint32_t weight = count; weight-- > 0;) {
      if (!expects_backward_gather(uses.names[weight])) continue;
      if (uses.recompute) step.push_back({.weight = weight, .phase = Phase::kRecompute, .micro_batch = micro_batch});
      step.push_back({.weight = weight,
                      .plane = uses.costs[weight].column.empty() ? Plane::kRow : Plane::kColumn,
                      .phase = Phase::kBackward,
                      .micro_batch = micro_batch});
    }
  }
  return step;
}

}  // namespace tessera::etp
