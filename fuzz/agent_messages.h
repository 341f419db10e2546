// The messages between a worker and its agent.
#pragma once

#include "base/bytes.h"
#include "fuzz/targets.h"

namespace tessera::fuzz {

void read_agent_frames(Input stream);
// A command or its result: u16 type, bool result, payload.
void read_agent_command(ByteReader& in);

}  // namespace tessera::fuzz
