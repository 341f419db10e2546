// The local tensors of one rank, in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/bus.h"
#include "tessera/checkpoint.h"
#include "tessera/memory.h"
#include "tools/wire_rules.h"

namespace tessera::tools {

struct HeldTensor {
  TensorInfo info;
  Layout layout;                // bound
  bool member = false;          // a rank of the tensor's mesh; others hold nothing of it
  Region region;                // that it holds
  std::span<std::byte> memory;  // packed row-major
};

// Move-only; not thread-safe.
class HeldTensors {
 public:
  // Allocates one block for all. REQUIRES: one layout for each tensor, bound to its shape. Throws
  // Error(kInvalidArgument), which names the tensor, if a layout has a rank outside the job, has terms that cannot be
  // reduced or would cut an F4 element pair; Error(kResourceExhausted) if memory is short.
  HeldTensors(std::vector<TensorInfo> tensors, std::vector<Layout> layouts, Rank rank, int world);

  Rank rank() const { return rank_; }
  std::span<const HeldTensor> tensors() const { return tensors_; }
  int64_t bytes() const { return bytes_; }
  // Specs of all tensors for the bus; without memory for those that this rank does not hold.
  std::vector<TensorSpec> specs(const WireRules& wires) const;

 private:
  Rank rank_;
  SharedBuffer block_;
  std::vector<HeldTensor> tensors_;
  int64_t bytes_ = 0;
};

}  // namespace tessera::tools
