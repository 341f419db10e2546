// The client of an agent daemon: transfers are posted to it through a command queue, everything else over its socket.
//
// The worker's process has two threads for it: one watches the agent, the other, where private tensors are copied, is
// idle otherwise. If the agent dies, calls under way and to come end with kPeerLost: an outcome that has not come is
// unknown, and a new Bus is to be made once the agent runs again.
#pragma once

#include <memory>

#include "bus/batch/client.h"

namespace tessera::bus {

// Waits until the daemon of (namespace, job, rank) runs on this machine and has opened a session. `options` are
// complete().
std::shared_ptr<BusClient> open_daemon_client(BusOptions options);

}  // namespace tessera::bus
