#include "etp/schedule/gather_cost.h"

#include <algorithm>

namespace tessera::etp {

uint32_t BufferKeys::index_of(const BufferKey& key) {
  const auto [found, is_new] = index_of_.try_emplace(key, static_cast<uint32_t>(keys_.size()));
  if (is_new) keys_.push_back(key);
  return found->second;
}

GatherCost gather_cost(const GatheredWeight& weight, BufferKeys& keys) {
  GatherCost cost{.chain = weight.chain, .experts = weight.experts > 0};
  for (const Plane plane : {Plane::kRow, Plane::kColumn}) {
    if (plane == Plane::kColumn && weight.format.one_plane()) continue;
    BufferKey key = gather_key(weight.padded_rows, weight.columns, weight.format, plane, weight.decoded);
    key.chain = weight.chain;
    key.group = weight.group;
    const int64_t bytes = key.bytes();
    auto& buffers = plane == Plane::kRow ? cost.row : cost.column;
    for (int expert = 0; expert < std::max(weight.experts, 1); ++expert) {
      if (cost.experts) key.expert = expert;
      buffers.push_back({keys.index_of(key), bytes});
    }
  }
  return cost;
}

}  // namespace tessera::etp
