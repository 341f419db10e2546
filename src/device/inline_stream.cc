#include "device/inline_stream.h"

#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

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

// What the recorder is told of an operation's waits, in memory that its thread uses again. Operations may nest.
class SpareNotes {
 public:
  SpareNotes() : notes_(std::exchange(spare(), {})) {}
  ~SpareNotes() { spare() = std::move(notes_); }
  SpareNotes(const SpareNotes&) = delete;
  SpareNotes& operator=(const SpareNotes&) = delete;

  void add(const Condition& condition) {
    if (used_ == notes_.size()) notes_.emplace_back();
    notes_[used_].clear();
    condition.note(notes_[used_++]);
  }
  std::span<const WaitNotes> all() const { return std::span(notes_).first(used_); }

 private:
  static std::vector<WaitNotes>& spare() {
    thread_local std::vector<WaitNotes> notes;
    return notes;
  }

  std::vector<WaitNotes> notes_;
  size_t used_ = 0;
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

void InlineStream::run(const Operation& operation, uint64_t) {
  if (poisoned_.load(std::memory_order_relaxed)) return;
  std::optional<SpareNotes> notes;  // while it is recorded
  if (device().recorder().on()) notes.emplace();
  uint64_t begin = 0, end = 0;
  try {
    std::optional<Deadline> deadline;
    for (const auto& condition : operation.after) {
      if (!device().concurrent() || !condition->met()) {  // a simulated host may let others run in any case
        if (!deadline) deadline = Deadline::after(operation.timeout.value_or(timeout_));
        device().wait_for(*condition, *deadline);
      }
      if (notes) notes->add(*condition);
    }
    const TraceSpan span(operation.name, {.subject = operation.subject, .bytes = operation.bytes});
    const TimePoint passed = link_ == nullptr ? TimePoint() : link_->take(operation.bytes);
    if (notes) begin = ticks();
    if (operation.body) operation.body();
    if (link_ != nullptr) sleep_until(passed);
    if (notes) end = ticks();
  } catch (...) {
    poison(failure_of(operation));
  }
  if (!notes) return;
  try {
    device().recorder().ran_here(operation, notes->all(), begin, end);
  } catch (...) {
    poison(failure_of(operation));
  }
}

}  // namespace tessera::device
