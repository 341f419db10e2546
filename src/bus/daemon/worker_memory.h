// The places of a worker's tensors for its agent daemon: in Tessera's shared memory, which the agent maps, or in
// private memory, which the worker lends (lender.h).
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
  std::vector<std::shared_ptr<SharedArena>> arenas;  // that tensors lie in, by number
  uint64_t lent_bytes = 0;  // of addresses, overlapping tensors as they overlap; 0: all is shared
};

// `manifest` is that of `specs`, `tensors` their local tensors. A tensor that is received lies in shared memory only
// where the agent may write: in an arena that no peer has been given.
MemoryPlacement place_tensors(const Manifest& manifest, std::span<const TensorSpec> specs,
                              std::span<const LocalTensor> tensors, bool sends);

}  // namespace tessera::bus
