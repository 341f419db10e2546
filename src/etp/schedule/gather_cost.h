// What it costs to gather a weight: its buffers, and the pools that they are of.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "etp/schedule/buffer_key.h"
#include "etp/schedule/consumption.h"

namespace tessera::etp {

// Numbers the keys of buffers, from 0. Not thread-safe.
class BufferKeys {
 public:
  uint32_t index_of(const BufferKey& key);  // a new one for a new key
  const BufferKey& key(uint32_t index) const { return keys_[index]; }
  size_t size() const { return keys_.size(); }

 private:
  std::vector<BufferKey> keys_{};
  std::unordered_map<BufferKey, uint32_t> index_of_{};
};

// A weight [padded_rows, columns], or `experts` of them that are gathered as one operation.
struct GatheredWeight {
  int64_t padded_rows = 0;
  int64_t columns = 0;
  WeightFormat format{};
  std::optional<DType> decoded = std::nullopt;  // as of gather_key()
  Chain chain = Chain::kUngraphed;
  uint32_t group = 0;
  int experts = 0;  // 0: no list of experts
};

// A column plane of its own costs buffers of its own, also where both decode to one dtype.
GatherCost gather_cost(const GatheredWeight& weight, BufferKeys& keys);

}  // namespace tessera::etp
