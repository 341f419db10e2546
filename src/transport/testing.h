// For tests with several processes.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <utility>

#include "base/testing.h"

namespace tessera::transport_testing {

// A forked process; killed if necessary, and reaped in the end. Fork before starting threads.
class Child {
 public:
  static constexpr int kThrew = 125;
  // `body` returns the exit status.
  explicit Child(const std::function<int()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      ::_exit(body());
    } catch (const std::exception& error) {  // otherwise gtest would catch it and continue in the child
      std::fprintf(stderr, "child: %s\n", error.what());
      ::_exit(kThrew);
    }
  }
  ~Child() {
    if (pid_ > 0) {
      kill();
      wait();
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void kill() const { ::kill(pid_, SIGKILL); }
  int wait() {
    int status = -1;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

inline bool forbid_process_vm_readv() {
  return forbid_system_call(SYS_process_vm_readv);
}

// Memory that stays shared across fork(), for a test and its child to communicate.
template <typename T>
class Shared {
 public:
  Shared() : value_(new(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T{}) {}
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// A pipe on which one process waits for another.
class Signal {
 public:
  Signal() { ok_ = ::pipe(ends_) == 0; }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void raise() const { [[maybe_unused]] const bool told = ok_ && ::write(ends_[1], "!", 1) == 1; }
  bool wait() const {
    char byte = 0;
    return ok_ && ::read(ends_[0], &byte, 1) == 1;
  }

 private:
  int ends_[2] = {-1, -1};
  bool ok_ = false;
};

}  // namespace tessera::transport_testing
