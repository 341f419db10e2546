#include "tests/support/fixture.h"

#include <signal.h>

#include <algorithm>

#include "base/fail.h"
#include "tests/support/agents.h"
#include "tests/support/raw_rank.h"

namespace tessera::test {

pid_t TestJobs::start(const std::string& name, std::function<int()> body) {
  processes_.push_back({.name = name, .pid = group_.start(name, std::move(body))});
  return processes_.back().pid;
}

pid_t TestJobs::start(const Side& side, const Body& body) {
  return start(side.who(), [=, this] { return with_batch(side, store_, body); });
}

pid_t TestJobs::start(const Side& side, const std::function<int(Pair& pair)>& body) {
  return start(side.who(), [=, this] { return with_pair(side, store_, body); });
}

pid_t TestJobs::start(const Side& side, const std::function<int(RawRank& raw)>& body) {
  return start(side.who(), [=, this] {
    RawRank raw(store_, side);
    return body(raw);
  });
}

pid_t TestJobs::start_agent(const std::string& job, Rank rank, const std::string& pull) {
  const std::string name = "the agent of " + job + "/" + std::to_string(rank);
  const pid_t pid = start(name, [=] { return run_agent(job, rank, pull); });
  processes_.back().agent = true;
  return pid;
}

TestJobs::Process& TestJobs::process(pid_t pid) {
  const auto found = std::ranges::find(processes_, pid, &Process::pid);
  if (found == processes_.end()) fail_internal("no process {}", pid);
  return *found;
}

const Outcome& TestJobs::of(pid_t pid, std::chrono::seconds limit) {
  Process& asked = process(pid);
  asked.asked = true;
  if (!asked.outcome) asked.outcome = group_.wait_for(pid, limit);
  return *asked.outcome;
}

const Outcome& TestJobs::of(const std::string& name) {
  const auto found = std::ranges::find(processes_, name, &Process::name);
  if (found == processes_.end()) fail_internal("no process {}", name);
  return of(found->pid);
}

void TestJobs::collect(bool agents, std::chrono::seconds limit) {
  std::vector<pid_t> pids;
  for (const Process& one : processes_)
    if (one.agent == agents && !one.outcome) pids.push_back(one.pid);
  if (agents)
    for (const pid_t pid : pids) group_.kill(pid, SIGTERM);
  std::vector<Outcome> outcomes = group_.wait(pids, limit);
  for (size_t i = 0; i < pids.size(); ++i) {
    if (agents) {
      EXPECT_EQ(outcomes[i].status, 0) << outcomes[i].name << ": " << outcomes[i].output;
    }
    process(pids[i]).outcome = std::move(outcomes[i]);
  }
}

std::vector<Outcome> TestJobs::wait(std::chrono::seconds limit) {
  for (const bool agents : {false, true}) collect(agents, limit);
  std::vector<Outcome> outcomes;
  for (const Process& one : processes_)
    if (!one.agent) outcomes.push_back(*one.outcome);
  return outcomes;
}

void TestJobs::expect_all_well(std::chrono::seconds limit) {
  wait(limit);
  int64_t killed = 0;
  for (const Process& one : processes_) {
    killed += one.outcome->status == -SIGKILL ? 1 : 0;
    if (!one.asked && !one.agent) {
      EXPECT_EQ(one.outcome->status, 0) << one.name << ": " << one.outcome->output;
    }
  }
  EXPECT_LE(left_folders(), killed);
}

int64_t TestJobs::left_folders() const {
  return std::ranges::count_if(group_.left_over(), [](const std::string& name) { return name.starts_with("p-"); });
}

}  // namespace tessera::test
