// testing: a transport for tests, between processes of one host. It can only stream. Frames come late and in odd
// pieces, depending on a seed. Only used if TESSERA_FORCE_TRANSPORT=testing, or testing:SEED, requests it.
#pragma once

#include "transport/transport.h"

namespace tessera {

const Transport& testing_transport();

}  // namespace tessera
