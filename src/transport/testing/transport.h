// testing: a transport of tests, between processes of one host: it can stream, and nothing else. Frames come late and
// in odd pieces, as a seed has it. Only where TESSERA_FORCE_TRANSPORT=testing, or testing:SEED, asks for it.
#pragma once

#include "transport/transport.h"

namespace tessera {

const Transport& testing_transport();

}  // namespace tessera
