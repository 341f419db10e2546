// Checks of a region that a caller gives.
#pragma once

#include <string_view>

#include "tessera/checkpoint.h"

namespace tessera::checkpoint {

// Throws Error(kInvalidArgument), whose message begins with `where`, unless the region is inside the tensor's shape and
// fills whole bytes.
void require_inside(const TensorInfo& tensor, const Region& region, std::string_view where);

}  // namespace tessera::checkpoint
