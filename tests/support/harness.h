// Runs the ranks of a test as real processes, under a hang limit.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fail.h"

namespace tessera::test {

// How long a test waits for processes that should have ended: a minute, as other work may keep the machine busy.
std::chrono::seconds hang_limit();

// A temporary folder, removed with its contents in the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A process's resources: after it has released everything that it made, they must be the same as before.
struct Footprint {
  uint32_t fds = 0;
  uint32_t threads = 0;
  uint32_t mappings = 0;  // of memfds
  static Footprint now() { return of(::getpid()); }
  static Footprint of(pid_t pid);
  std::string to_string() const;
  bool within(const Footprint& bound) const {
    return fds <= bound.fds && threads <= bound.threads && mappings <= bound.mappings;
  }
  bool operator==(const Footprint&) const = default;
};

// A T of atomics, zeroed, in memory that forked processes share.
template <typename T>
class Shared {
 public:
  Shared() {
    void* memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail_errno("mmap");
    value_ = new (memory) T{};
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

// How a rank's process ended.
struct Outcome {
  std::string name;
  int status = -1;     // exit status; -signal if it was killed; -1000 if it hung and was killed here
  std::string output;  // what it wrote to standard error
  double seconds = 0;  // from the group's start to its end
};

// When the process that was killed by SIGKILL ended; 0 if none was.
double seconds_of_death(std::span<const Outcome> outcomes);

// A group of forked processes. The test's own process must have no other thread when start() is called.
class ProcessGroup {
 public:
  ProcessGroup();
  ~ProcessGroup();  // kills and reaps what is left

  // Forks: `body` runs in the child with TESSERA_RUNTIME_DIR set to the group's folder, and its result is the exit
  // status. An exception ends the child with its text on standard error: status 10 + the ErrorCode of a tessera::Error.
  pid_t start(const std::string& name, std::function<int()> body);
  // Starts a store in a separate process; returns its URL. After one was killed, another may be started at the same
  // URL.
  std::string start_store(const std::string& url = "tcp://127.0.0.1:0");
  pid_t store_pid() const { return store_; }
  void kill_store();
  void kill(pid_t pid, int signal);
  // Waits for one of them, at most `limit`.
  Outcome wait_for(pid_t pid, std::chrono::seconds limit);
  // Waits for these, at most `limit` for all of them.
  std::vector<Outcome> wait(std::span<const pid_t> pids, std::chrono::seconds limit);
  // Likewise for all but the store. More can be started afterwards.
  std::vector<Outcome> wait(std::chrono::seconds limit);
  const std::string& folder() const { return folder_.path(); }
  // What is left in the runtime folder: nothing, once all processes have ended well.
  std::vector<std::string> left_over() const;

 private:
  struct Child;
  Child& child(pid_t pid);
  std::optional<Outcome> reap(Child& child, std::chrono::steady_clock::time_point deadline) const;
  TemporaryFolder folder_;
  std::vector<Child> children_;
  int started_ = 0;
  pid_t store_ = -1;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tessera::test
