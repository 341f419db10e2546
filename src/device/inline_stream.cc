#include "device/inline_stream.h"

#include <thread>
#include <utility>

#include "base/fail.h"
#include "base/trace.h"
#include "device/device.h"
#include "device/link.h"

namespace tessera::device {
namespace {

// The event of a poisoned stream.
class FailedSource final : public EventSource {
 public:
  FailedSource(std::string name, Status status) : name_(std::move(name)), status_(std::move(status)) {}
  bool done(uint64_t) const override { return true; }
  bool wait(uint64_t, const Deadline&) const override { return true; }
  Status status(uint64_t) const override { return status_; }
  std::string to_string() const override { return "stream " + name_; }

 private:
  const std::string name_;
  const Status status_;
};

void sleep_until(TimePoint when) {
  while (Clock::steady().now() < when) {
    std::this_thread::sleep_until(WaitHook::next_wake(Deadline::at(when)).when());
    WaitHook::woken();
  }
}

}  // namespace

InlineStream::InlineStream(const StreamOptions& options, Device& device)
    : Stream(options.name, device, 0), link_(options.link), timeout_(options.timeout) {}

Status InlineStream::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

Status InlineStream::take_error() {
  const MutexLock lock(mutex_);
  poisoned_.store(false, std::memory_order_relaxed);
  return std::exchange(status_, {});
}

void InlineStream::poison(Status status) {
  const MutexLock lock(mutex_);
  if (!status_.ok()) return;
  status_ = std::move(status);
  poisoned_.store(true, std::memory_order_relaxed);
}

Event InlineStream::mark(uint64_t) {
  if (!poisoned_.load(std::memory_order_relaxed)) return {};
  return {std::make_shared<FailedSource>(name(), status()), 0, 0};
}

void InlineStream::give_wait(const Event& event) {
  if (poisoned_.load(std::memory_order_relaxed)) return;
  try {
    device().wait_host(event, Deadline::after(timeout_));
  } catch (...) {
    poison(status_of_current_exception());
  }
}

void InlineStream::await_all(const Operation& operation) {
  const Deadline deadline = Deadline::after(operation.timeout.value_or(timeout_));
  for (const auto& condition : operation.after) device().wait_host(*condition, deadline);
}

void InlineStream::note_run(const Operation& operation) const {
  std::vector<Access> accesses = operation.accesses;
  for (const auto& condition : operation.after) {
    const std::vector<Access> more = condition->accesses();
    accesses.insert(accesses.end(), more.begin(), more.end());
  }
  device().recorder().operation(0, 0, operation.name, operation.subject, accesses, operation.writes);
}

void InlineStream::run(const Operation& operation, uint64_t) {
  if (poisoned_.load(std::memory_order_relaxed)) return;
  try {
    if (!operation.after.empty()) await_all(operation);
    if (device().recorder().on()) note_run(operation);
    const TraceSpan span(operation.name, {.subject = operation.subject, .bytes = operation.bytes});
    const TimePoint passed = link_ == nullptr ? TimePoint() : link_->take(operation.bytes);
    const bool recorded = device().recorder().on();
    const TimePoint begin = recorded ? Clock::steady().now() : TimePoint();
    if (operation.body) operation.body();
    if (link_ != nullptr) sleep_until(passed);
    if (recorded) device().recorder().ran(0, 0, begin, Clock::steady().now());
  } catch (...) {
    poison(failure_of(operation));
  }
}

}  // namespace tessera::device
