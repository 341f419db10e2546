#include "device/condition.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::device {
namespace {

thread_local WaitHook* innermost_hook = nullptr;

}  // namespace

WaitHook::WaitHook(void (*at_wake)(void*), void* argument)
    : at_wake_(at_wake), argument_(argument), outer_(innermost_hook) {
  innermost_hook = this;
}

WaitHook::~WaitHook() {
  innermost_hook = outer_;
}

void WaitHook::woken() {
  if (innermost_hook != nullptr) innermost_hook->at_wake_(innermost_hook->argument_);
}

void WaitHook::outer_woken() const {
  if (outer_ != nullptr) outer_->at_wake_(outer_->argument_);
}

Deadline WaitHook::next_wake(const Deadline& deadline) {
  if (innermost_hook == nullptr) return deadline;
  return Deadline::at(std::min(deadline.when(), Deadline::after(kWakeEvery).when()));
}

void await(const Condition& condition, const Deadline& deadline) {
  if (condition.met()) return;
  const TimePoint begin = Clock::steady().now();
  for (;;) {
    condition.sleep(WaitHook::next_wake(deadline));
    if (condition.met()) return;
    if (innermost_hook != nullptr) {
      WaitHook::woken();
      condition.check();
    }
    if (!deadline.passed()) continue;
    const std::string why = condition.explain();
    fail(ErrorCode::kDeadlineExceeded, "waited {:.3g} s for {}"_message, to_seconds(Clock::steady().now() - begin),
         condition.to_string() + (why.empty() ? "" : ": " + why));
  }
}

}  // namespace tessera::device
