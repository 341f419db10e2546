// Back ends that a build may leave out: either the folder of that name or its no_<name>.cc defines each function.
#pragma once

#include "collective/group.h"

namespace tessera::collective {

// Throws Error(kUnimplemented) in a build without it.
BackendTraits nccl_traits();

}  // namespace tessera::collective
