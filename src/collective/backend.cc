#include "collective/backend.h"

namespace tessera::collective {

BackendTraits traits_of(Backend backend) {
  return backend == Backend::kNccl ? nccl_traits() : BackendTraits{.name = "pulls", .needs_matched_order = false};
}

}  // namespace tessera::collective
