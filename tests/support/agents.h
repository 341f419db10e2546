// Agent daemons beside the processes of a test.
#pragma once

#include <string>

#include "tessera/bus.h"

namespace tessera::test {

// What the process of an agent does, in the default namespace, until SIGTERM. `pull` is its TESSERA_FORCE_PULL.
int run_agent(const std::string& job, Rank rank, const std::string& pull = "");

// What the worker of rank 0 of that job, which has an agent, opens its bus with.
BusOptions worker_of(const std::string& job, const std::string& store);

}  // namespace tessera::test
