// Checks a layout against the job whose ranks it uses.
#pragma once

#include "tessera/layout.h"

namespace tessera {

// Throws Error(kInvalidArgument) if the layout's mesh has ranks that a job of `world` ranks does not have.
void require_ranks_of_job(const Layout& layout, int world);

}  // namespace tessera
