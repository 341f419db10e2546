// Agent daemons beside the processes of a test.
#pragma once

#include <string>

#include "tessera/bus.h"

namespace tessera::test {

// The body of an agent's process, in the default namespace, until SIGTERM. `pull` is its TESSERA_FORCE_PULL.
int run_agent(const std::string& job, Rank rank, const std::string& pull = "");

// The bus options of the worker of rank 0 of that job, which has an agent.
BusOptions worker_of(const std::string& job, const std::string& store);

}  // namespace tessera::test
