// Waits for an operation of the bus until its end.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/bus.h"

namespace tessera::tools {

class Interrupt;

// Waits for the operation's end and shows its progress; a signal cancels it. Returns its version; throws its error.
int64_t follow(Handle& handle, const std::string& label, Interrupt& interrupt);

}  // namespace tessera::tools
