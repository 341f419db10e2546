// Where the routes that a rank serves lie: in its tensors, in what it has reduced, or in what was prepared of them.
#pragma once

#include <cstdint>
#include <vector>

#include "bus/prepare/preparation.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"

namespace tessera::bus {

// The elements of a sent route in a slot: in its tensor, or where `reducer` has the result of its reduction.
ServedRoute sent_elements(const SessionSetup& setup, const Reducer* reducer, const SentRoute& route, uint32_t slot);
// Route `sent` of routes.sent as it travels: its elements, or its piece where it is quantised.
ServedRoute sent_route(const SessionSetup& setup, const Preparation& preparation, uint32_t sent, uint32_t slot);
// What the caller reads here, in the order of its routes, as it finds it in the first slot.
std::vector<ServedRoute> served_to(const SessionSetup& setup, const Preparation& preparation, const Caller& caller);

}  // namespace tessera::bus
