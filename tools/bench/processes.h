// The processes of `tessera bench`: they are forked, report over a pipe, and end when their parent ends.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace tessera::bench {

// A forked child. It is killed and reaped when the object is destroyed, and the kernel kills it when the thread that
// started it ends. Move-only; thread-compatible, except for kill().
class Process {
 public:
  // Sends one message to the parent.
  using Say = std::function<void(std::string_view message)>;

  // Runs `body` in a new process, which ends with it. If `body` throws, the parent gets the error as the last message.
  // REQUIRES: the calling process has one thread (a child of several may not start threads under every sanitizer).
  static Process start(std::string name, const std::function<void(const Say&)>& body);

  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();

  const std::string& name() const { return name_; }
  pid_t pid() const { return pid_; }
  // Sends SIGKILL. May be called from any thread. The destructor reaps the process.
  void kill() const;

  // The next message. Throws Error: what the process threw, after its name; kPeerLost if it ended; kDeadlineExceeded.
  std::string hear(Deadline deadline);

 private:
  friend std::vector<std::string> hear_all(std::span<Process> processes, Deadline deadline);
  Process(std::string name, pid_t pid, UniqueFd pipe) : name_(std::move(name)), pid_(pid), pipe_(std::move(pipe)) {}

  bool has_message() const;  // a whole one, or the end
  void receive();            // reads what has arrived; blocks if that is nothing
  std::string take();

  std::string name_;
  pid_t pid_;
  UniqueFd pipe_;
  std::string received_;
  bool ended_ = false;
};

// The next message of each. Throws like Process::hear() as soon as any of them has failed or ended.
std::vector<std::string> hear_all(std::span<Process> processes, Deadline deadline);

// Here the processes that are forked while it exists wait for each other. A process's n-th call returns once all have
// made n calls.
class Barrier {
 public:
  explicit Barrier(uint32_t processes);
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  ~Barrier();

  // Throws kDeadlineExceeded.
  void arrive_and_wait(Deadline deadline);

 private:
  const uint32_t processes_;
  std::atomic<uint32_t>* arrivals_;  // calls of all processes so far, in memory that they share
};

}  // namespace tessera::bench
