// loopback: source and destination in one process.
#pragma once

#include "transport/transport.h"

namespace tessera {

const Transport& loopback_transport();

}  // namespace tessera
