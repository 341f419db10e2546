// Seeing an operation of the bus through to its end.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/bus.h"

namespace tessera::tools {

class Interrupt;

// Waits for the operation's end and shows its progress meanwhile; a signal cancels it. Returns its version, throws what
// it failed with.
int64_t follow(Handle& handle, const std::string& label, Interrupt& interrupt);

}  // namespace tessera::tools
