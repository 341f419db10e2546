// shm: two processes of one host and one pid namespace, host memory.
#pragma once

#include "transport/transport.h"

namespace tessera {

const Transport& shm_transport();

}  // namespace tessera
