// Consent to having one's private memory read, where Yama asks for it (kernel.yama.ptrace_scope is 1).
#pragma once

#include <sys/types.h>

#include <string_view>

#include "base/config.h"
#include "transport/consent.h"

namespace tessera {

// While one with the option "any" lives, every process of this user may read this process' memory, and trace it. Yama
// keeps one tracer a process, so that naming the peers instead could serve only one of them. The first such object of
// the process gives the consent and logs it, the last one withdraws it. A forked child has not consented. Thread-safe.
class PtraceConsent final : public Consent {
 public:
  // Without the option (empty) nothing is asked of the kernel. Throws Error(kInvalidArgument) for one that is neither
  // empty nor "any". A kernel without Yama needs no consent; one that refuses it is logged, and the bounce ring serves.
  explicit PtraceConsent(std::string_view option = Config::get().allow_ptrace);
  ~PtraceConsent() override;

 private:
  pid_t giver_ = 0;  // the process that it holds for; 0: none
};

}  // namespace tessera
