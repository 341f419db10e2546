#include "tests/support/agents.h"

#include <gtest/gtest.h>
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

pid_t AgentGroup::start_agent(const std::string& job, Rank rank, const std::string& pull) {
  agents_.push_back(
      group_.start("the agent of " + job + "/" + std::to_string(rank), [=] { return run_agent(job, rank, pull); }));
  return agents_.back();
}

pid_t AgentGroup::start(const std::string& name, std::function<int()> body) {
  workers_.push_back(group_.start(name, std::move(body)));
  return workers_.back();
}

void AgentGroup::wait(std::chrono::seconds limit) {
  for (const pid_t worker : workers_) {
    const Outcome outcome = group_.wait_for(worker, limit);
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
  }
  for (const pid_t agent : agents_) group_.kill(agent, SIGTERM);
  for (const Outcome& outcome : group_.wait(limit))
    EXPECT_EQ(outcome.status, 0) << outcome.name << ": " << outcome.output;
}

}  // namespace tessera::test
