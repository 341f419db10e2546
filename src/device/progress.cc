#include "device/progress.h"

#include "base/futex.h"
#include "device/condition.h"

namespace tessera::device {

void Progress::end(uint64_t ticket) {
  ended_.store(ticket);  // before the load: a waiter stores wake_at_ and then loads this
  if (wake_at_.load() > ticket) return;
  wake_at_.store(kNobody);
  bell_.fetch_add(1);
  futex_wake(bell_);
}

bool Progress::wait(uint64_t ticket, const Deadline& deadline) const {
  while (!done(ticket)) {
    const uint32_t rung = bell_.load();
    for (uint64_t lowest = wake_at_.load(); lowest > ticket && !wake_at_.compare_exchange_weak(lowest, ticket);) {
    }
    if (ended_.load() >= ticket) break;
    futex_wait(bell_, rung, WaitHook::next_wake(deadline));
    if (done(ticket)) break;
    WaitHook::woken();
    if (deadline.passed()) return done(ticket);
  }
  return true;
}

Status Progress::status(uint64_t ticket) const {
  if (!poisoned_once_.load(std::memory_order_acquire)) return {};
  const MutexLock lock(mutex_);
  for (const Failure& failure : failures_)
    if (failure.first <= ticket && ticket <= failure.last) return failure.status;
  return {};
}

void Progress::fail(uint64_t ticket, Status status) {
  const MutexLock lock(mutex_);
  if (poisoned_.load()) return;
  failures_.push_back({.first = ticket, .last = UINT64_MAX, .status = std::move(status)});
  poisoned_once_.store(true, std::memory_order_release);
  poisoned_.store(true, std::memory_order_release);
}

Status Progress::status() const {
  const MutexLock lock(mutex_);
  return poisoned_.load() ? failures_.back().status : Status();
}

Status Progress::forget(uint64_t last) {
  const MutexLock lock(mutex_);
  if (!poisoned_.load()) return {};
  poisoned_.store(false, std::memory_order_release);
  failures_.back().last = last;
  return failures_.back().status;
}

}  // namespace tessera::device
