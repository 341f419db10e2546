// Detects use in a forked child. The child has its parent's objects but none of their threads, so a call would wait for
// them for ever.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <string_view>

#include "base/fail.h"

namespace tessera {

class ForkGuard {
 public:
  bool here() const { return ::getpid() == pid_; }
  // Throws kInvalidArgument in a forked child.
  void require(std::string_view who) const {
    if (!here())
      fail(ErrorCode::kInvalidArgument, "{}: this is a forked child of pid {}; create a separate Bus here"_message, who,
           pid_);
  }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace tessera
