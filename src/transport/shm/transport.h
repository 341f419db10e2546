// shm: two processes in one host and pid namespace, host memory.
#pragma once

#include "transport/transport.h"

namespace tessera {

const Transport& shm_transport();

}  // namespace tessera
