// Agent daemons beside the processes of a test.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tessera/layout.h"
#include "tests/support/harness.h"

namespace tessera::test {

// What the process of an agent does, in the default namespace, until SIGTERM. `pull` is its TESSERA_FORCE_PULL.
int run_agent(const std::string& job, Rank rank, const std::string& pull = "");

// Workers, and the agents that some of them have.
class AgentGroup {
 public:
  explicit AgentGroup(ProcessGroup& group) : group_(group) {}

  pid_t start_agent(const std::string& job, Rank rank, const std::string& pull = "");
  pid_t start(const std::string& name, std::function<int()> body);
  // Waits for the workers, then ends the agents; expects that all of both end well.
  void wait(std::chrono::seconds limit);

 private:
  ProcessGroup& group_;
  std::vector<pid_t> workers_;
  std::vector<pid_t> agents_;
};

}  // namespace tessera::test
