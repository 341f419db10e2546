// Where a worker's tensors are for its agent daemon: in Tessera's shared memory, which the agent maps, or in private
// memory, which the worker lends (lender.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bus/daemon/messages.h"
#include "bus/registration/local_tensors.h"

namespace tessera {
class SharedArena;
}

namespace tessera::bus {

struct MemoryPlacement {
  std::vector<RegisterCall::Tensor> tensors;
  std::vector<std::shared_ptr<SharedArena>> arenas;  // that tensors are in, by number
  // The size of the address range for lent memory; tensors overlap there as in the worker. 0: all is shared
  uint64_t lent_bytes = 0;
};

// `manifest` belongs to `specs`, `tensors` are their local tensors. A received tensor counts as shared only where the
// agent may write: in an arena that no peer has a descriptor of.
MemoryPlacement place_tensors(const Manifest& manifest, std::span<const TensorSpec> specs,
                              std::span<const LocalTensor> tensors, bool sends);

}  // namespace tessera::bus
