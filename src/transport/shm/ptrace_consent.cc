#include "transport/shm/ptrace_consent.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"

namespace tessera {
namespace {

// How many objects of process `pid` hold the consent. Those that a forked child inherits do not count there.
struct ConsentHolders {
  Mutex mutex;
  pid_t pid GUARDED_BY(mutex) = 0;
  int count GUARDED_BY(mutex) = 0;
};

ConsentHolders& holders() {
  static ConsentHolders holders;
  return holders;
}

void give() {
  if (::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) == 0)
    log_event(LogLevel::warn, "ptrace.allowed", {},
              "TESSERA_ALLOW_PTRACE=any: every process of this user may read and trace this one"_message);
  else if (errno != EINVAL)  // EINVAL: no Yama, so no consent is needed
    log_event(LogLevel::warn, "ptrace.refused", {}, "TESSERA_ALLOW_PTRACE=any: prctl(PR_SET_PTRACER): {}"_message,
              std::strerror(errno));
}

}  // namespace

PtraceConsent::PtraceConsent(std::string_view option) {
  if (option.empty()) return;
  if (option != "any")
    fail(ErrorCode::kInvalidArgument, "TESSERA_ALLOW_PTRACE is \"{}\": it must be any"_message, option);
  const MutexLock lock(holders().mutex);
  giver_ = ::getpid();
  if (std::exchange(holders().pid, giver_) != giver_) holders().count = 0;
  if (holders().count++ == 0) give();
}

PtraceConsent::~PtraceConsent() {
  if (giver_ != ::getpid()) return;
  const MutexLock lock(holders().mutex);
  if (--holders().count == 0) (void)::prctl(PR_SET_PTRACER, 0, 0, 0, 0);
}

}  // namespace tessera
