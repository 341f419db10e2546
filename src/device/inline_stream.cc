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

void InlineStream::await_all(const Operation& operation, std::vector<Access>& accesses) {
  const Deadline deadline = Deadline::after(operation.timeout.value_or(timeout_));
  for (const auto& condition : operation.after) device().wait_for(*condition, deadline, &accesses);
}

void InlineStream::run(const Operation& operation, uint64_t) {
  if (poisoned_.load(std::memory_order_relaxed)) return;
  Recorder& recorder = device().recorder();
  std::vector<Access> accesses;  // besides those that are declared
  bool recorded = false;
  TimePoint begin, end;
  try {
    if (!operation.after.empty()) await_all(operation, accesses);
    if (!accesses.empty()) accesses.insert(accesses.begin(), operation.accesses.begin(), operation.accesses.end());
    const TraceSpan span(operation.name, {.subject = operation.subject, .bytes = operation.bytes});
    const TimePoint passed = link_ == nullptr ? TimePoint() : link_->take(operation.bytes);
    recorded = recorder.on();
    if (recorded) begin = Clock::steady().now();
    if (operation.body) operation.body();
    if (link_ != nullptr) sleep_until(passed);
    if (recorded) end = Clock::steady().now();
  } catch (...) {
    poison(failure_of(operation));
  }
  if (!recorded) return;
  try {
    recorder.ran_here(operation.name, operation.subject, accesses.empty() ? operation.accesses : accesses,
                      operation.writes, begin, end);
  } catch (...) {
    poison(failure_of(operation));
  }
}

}  // namespace tessera::device
