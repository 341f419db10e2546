// What a receiver wants from one sender, and where it goes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bus/session/pull_link.h"
#include "bus/session/session.h"

namespace tessera::bus {

// From `rank` of the sending job, in the order of the routes. `ties` is the result of find_ties() for the tensors.
std::vector<WantedRoute> wanted_routes(const SessionSetup& setup, Rank rank, std::span<const uint32_t> ties);

}  // namespace tessera::bus
