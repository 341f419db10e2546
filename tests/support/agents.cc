#include "tests/support/agents.h"

#include <signal.h>

#include <cstdlib>

#include "base/runtime_dir.h"
#include "bus/daemon/daemon.h"

namespace tessera::test {

int run_agent(const std::string& job, Rank rank, const std::string& pull) {
  ::setenv("TESSERA_FORCE_PULL", pull.c_str(), 1);
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  const bus::Daemon daemon({.name_space = "default", .job = job, .rank = rank});
  int signal = 0;
  return ::sigwait(&ends, &signal);
}

BusOptions worker_of(const std::string& job, const std::string& store) {
  return {.job = job, .rank = 0, .world = 1, .store = store, .agent = "daemon", .timeout = std::chrono::seconds(5)};
}

}  // namespace tessera::test
