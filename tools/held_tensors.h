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
  bool member = false;          // of the tensor's mesh; otherwise this rank holds nothing of it
  Region region;                // what it holds
  std::span<std::byte> memory;  // packed row-major
};

// Move-only; not thread-safe.
class HeldTensors {
 public:
  // Allocates one block for all. REQUIRES: one layout a tensor, bound to its shape. Throws Error(kInvalidArgument) that
  // names the tensor where a layout has a rank outside the job, has terms that cannot be reduced or would cut an F4
  // element pair, Error(kResourceExhausted) where memory is short.
  HeldTensors(std::vector<TensorInfo> tensors, std::vector<Layout> layouts, Rank rank, int world);

  Rank rank() const { return rank_; }
  std::span<const HeldTensor> tensors() const { return tensors_; }
  int64_t bytes() const { return bytes_; }
  // All of them, as the bus takes them; those of other ranks without memory.
  std::vector<TensorSpec> specs(const WireRules& wires) const;

 private:
  Rank rank_;
  SharedBuffer block_;
  std::vector<HeldTensor> tensors_;
  int64_t bytes_ = 0;
};

}  // namespace tessera::tools
