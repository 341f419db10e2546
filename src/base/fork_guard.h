// Detects use in a forked child. The child has its parent's objects but none of their threads, so a call would wait for
// them for ever.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string_view>

#include "base/fail.h"

namespace tessera {

// How many forks lie between this process and the one in which this was first called. Costs no system call. Forks that
// bypass the C library are not counted.
uint64_t fork_count();

class ForkGuard {
 public:
  bool here() const { return fork_count() == forks_; }
  // Throws kInvalidArgument in a forked child.
  void require(std::string_view who) const {
    if (!here())
      fail(ErrorCode::kInvalidArgument, "{}: this is a forked child of pid {}; create a separate Bus here"_message, who,
           pid_);
  }

 private:
  uint64_t forks_ = fork_count();
  pid_t pid_ = ::getpid();
};

}  // namespace tessera
