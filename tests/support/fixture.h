// The setup of tests between processes: a store, ranks of jobs on it, agent daemons beside some of them, and ranks that
// a test scripts.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/harness.h"
#include "tests/support/jobs.h"

namespace tessera::test {

class RawRank;

// What a rank does with its batch; returns its exit status.
using Body = std::function<int(Batch& batch, std::vector<float>& tensor)>;

// Processes by name; a rank's is "trainer/0". All of them must end with 0, except those that the test asks about.
class TestJobs {
 public:
  pid_t start(const std::string& name, std::function<int()> body);
  // A rank that has registered its tensor.
  pid_t start(const Side& side, const Body& body);
  // A rank that has joined the pair.
  pid_t start(const Side& side, const std::function<int(Pair& pair)>& body);
  // Likewise, a rank whose part of the protocol the body speaks.
  pid_t start(const Side& side, const std::function<int(RawRank& raw)>& body);
  // The agent of a rank, until all others have ended. `pull` is its TESSERA_FORCE_PULL.
  pid_t start_agent(const std::string& job, Rank rank, const std::string& pull = "");
  pid_t start_agent(const Side& side) { return start_agent(side.job, side.rank); }

  const std::string& store() const { return store_; }
  // How it ended; if it has not, waits for it, at most `limit`. If several have the same name: the first.
  const Outcome& of(pid_t pid, std::chrono::seconds limit = 2 * hang_limit());
  const Outcome& of(const std::string& name);
  // Waits for all except the agents, at most `limit`; then ends those, and expects that they end well. Returns how the
  // others ended.
  std::vector<Outcome> wait(std::chrono::seconds limit = 2 * hang_limit());
  // Likewise; expects status 0 of all that of() was not called for, and in the runtime folder at most what killed
  // processes have left.
  void expect_all_well(std::chrono::seconds limit = 2 * hang_limit());

 protected:
  // The number of process folders in the runtime folder.
  int64_t left_folders() const;

  ProcessGroup group_;
  const std::string store_ = group_.start_store();

 private:
  struct Process {
    std::string name;
    pid_t pid = -1;
    bool agent = false;
    bool asked = false;
    std::optional<Outcome> outcome = {};
  };
  Process& process(pid_t pid);
  void collect(bool agents, std::chrono::seconds limit);
  std::deque<Process> processes_;
};

class JobsTest : public testing::Test, protected TestJobs {};

}  // namespace tessera::test
