// Stands in for collective/nccl/ in builds without it.
#include "base/fail.h"
#include "collective/backend.h"

namespace tessera::collective {

BackendTraits nccl_traits() {
  fail(ErrorCode::kUnimplemented,
       "collectives over NCCL: this release moves weights by reading shared memory of one host; the folder "
       "collective/nccl/ adds GPUs, with gathers that all ranks call in one order. Use Backend::kPulls"_message);
}

}  // namespace tessera::collective
