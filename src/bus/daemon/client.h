// The client of an agent daemon: transfers are posted to it through a command queue, everything else goes over its
// socket.
//
// It has two threads in the worker's process: one watches the agent, the other copies private tensors and is idle
// otherwise. If the agent dies, current and future calls end with kPeerLost: an outcome that has not arrived is
// unknown. Make a new Bus once the agent runs again.
#pragma once

#include <memory>

#include "bus/batch/client.h"

namespace tessera::bus {

// Waits until the daemon of (namespace, job, rank) runs on this machine and has opened a session. `options` must come
// from complete().
std::shared_ptr<BusClient> open_daemon_client(BusOptions options);

}  // namespace tessera::bus
