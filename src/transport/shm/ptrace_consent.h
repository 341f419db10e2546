// Consent to other processes reading this one's private memory, where Yama requires it (kernel.yama.ptrace_scope is 1).
#pragma once

#include <sys/types.h>

#include <string_view>

#include "base/config.h"
#include "transport/consent.h"

namespace tessera {

// While an object with the option "any" lives, every process of this user may read this process's memory, and trace it.
// Yama allows only one tracer for each process, so naming the peers instead could serve only one of them. The first
// such object of the process gives the consent and logs it, the last one withdraws it. A forked child has not
// consented. Thread-safe.
class PtraceConsent final : public Consent {
 public:
  // Without the option (empty) the kernel is not asked. Throws Error(kInvalidArgument) if it is neither empty nor
  // "any". A kernel without Yama needs no consent; if one refuses, this is logged, and the bounce ring is used instead.
  explicit PtraceConsent(std::string_view option = Config::get().allow_ptrace);
  ~PtraceConsent() override;

 private:
  pid_t giver_ = 0;  // the process that gave it; 0: none
};

}  // namespace tessera
