// What a receiver wants of one sender, and where it goes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bus/session/pull_link.h"
#include "bus/session/session.h"

namespace tessera::bus {

// From `rank` of the sending job, in the order of the routes. `ties`: find_ties() of the tensors.
std::vector<WantedRoute> wanted_routes(const SessionSetup& setup, Rank rank, std::span<const uint32_t> ties);

}  // namespace tessera::bus
