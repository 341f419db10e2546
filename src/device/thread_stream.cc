#include "device/thread_stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/fail.h"
#include "base/fork_guard.h"
#include "base/futex.h"
#include "base/thread.h"
#include "base/trace.h"
#include "device/device.h"
#include "device/link.h"

namespace tessera::device {
ThreadStream::ThreadStream(const StreamOptions& options, Device& device)
    : Stream(options.name, device, device.recorder().add_actor(options.name)),
      link_(options.link),
      timeout_(options.timeout),
      forks_(fork_count()),
      progress_(std::make_shared<Progress>(options.name)),
      thread_(start_thread("tessera-s-" + options.name, [this] { work(); })) {}

ThreadStream::~ThreadStream() {
  if (fork_count() != forks_) {  // a forked child does not have the thread
    thread_.detach();
    return;
  }
  try {
    close(Deadline::at(TimePoint::max()));
  } catch (...) {  // a hook ends the wait: what has not begun is dropped
    dropping_.store(true);
    ring();
    if (thread_.joinable()) thread_.join();
  }
}

void ThreadStream::close(const Deadline& deadline) {
  require_here();
  uint64_t given = 0;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (deadline.passed()) dropping_.store(true);
    given = given_;
  }
  ring();
  if (!thread_.joinable()) return;
  if (!progress_->wait(given, deadline)) {
    dropping_.store(true);
    ring();
  }
  thread_.join();
}

void ThreadStream::require_here() const {
  if (fork_count() != forks_)
    fail(ErrorCode::kInvalidArgument,
         "stream {}: this is a forked child, which does not have the stream's thread; "
         "make a stream in the child"_message,
         name());
}

void ThreadStream::push(Item item) {
  require_here();
  bool wakes = false;
  {
    const MutexLock lock(mutex_);
    if (stopping_) fail(ErrorCode::kInvalidArgument, "stream {} is closed"_message, name());
    item.ticket = ++given_;
    queue_.push_back(std::move(item));
    wakes = std::exchange(asleep_, false);
  }
  if (wakes) ring();
}

void ThreadStream::ring() {
  bell_.fetch_add(1);
  futex_wake(bell_);
}

void ThreadStream::take(std::vector<Item>& batch) {
  for (;;) {
    const uint32_t rung = bell_.load();
    {
      const MutexLock lock(mutex_);
      if (!helping_) batch.swap(queue_);
      working_ = !batch.empty();
      if (working_ || (stopping_ && !helping_)) return;
      asleep_ = true;
    }
    futex_wait(bell_, rung, Deadline::at(TimePoint::max()));
  }
}

void ThreadStream::give(Operation&& operation, uint64_t number) {
  push({.number = number, .operation = std::make_shared<const Operation>(std::move(operation))});
}

void ThreadStream::give(std::shared_ptr<const Operation> operation, uint64_t number) {
  push({.number = number, .operation = std::move(operation)});
}

void ThreadStream::give_wait(const Event& event) {
  push({.event = event});
}

Event ThreadStream::mark(uint64_t event) {
  require_here();
  const MutexLock lock(mutex_);
  return {progress_, given_, event};
}

Status ThreadStream::take_error() {
  uint64_t last = 0;
  {
    const MutexLock lock(mutex_);
    last = given_;
  }
  if (!progress_->poisoned()) return {};
  Status status = progress_->forget(last);
  push({});  // later events have a later ticket than the poison's last
  return status;
}

void ThreadStream::work() {
  std::vector<Item> batch;
  for (take(batch); !batch.empty(); take(batch)) {
    for (Item& item : batch) run_and_end(item);
    batch.clear();
  }
}

void ThreadStream::run_and_end(Item& item) {
  run(item);
  item.operation.reset();  // what it holds is released before anybody sees its end
  item.event = {};
  progress_->end(item.ticket);
}

bool ThreadStream::could_run(const Item& item) const {
  if (item.operation == nullptr) return item.event.done();
  try {
    return std::ranges::all_of(item.operation->after, [](const auto& condition) { return condition->met(); });
  } catch (...) {  // the thread finds out why
    return false;
  }
}

void ThreadStream::help(uint64_t ticket) {
  if (fork_count() != forks_) return;
  {
    const MutexLock lock(mutex_);
    if (working_ || helping_ || stopping_ || queue_.empty()) return;
    helping_ = true;
    helped_.swap(queue_);
  }
  auto next = helped_.begin();
  for (; next != helped_.end() && next->ticket <= ticket && could_run(*next); ++next) run_and_end(*next);
  bool wakes = false;
  {
    const MutexLock lock(mutex_);
    helped_.erase(helped_.begin(), next);
    helped_.insert(helped_.end(), std::make_move_iterator(queue_.begin()), std::make_move_iterator(queue_.end()));
    queue_.clear();
    queue_.swap(helped_);
    helping_ = false;
    wakes = (!queue_.empty() || stopping_) && std::exchange(asleep_, false);
  }
  if (wakes) ring();
}

void ThreadStream::run(const Item& item) {
  if (progress_->skips(item.ticket)) return;
  if (dropping_.load()) {
    if (item.operation != nullptr || !item.event.done())
      progress_->fail(item.ticket,
                      failed(ErrorCode::kCancelled, "stream {} was closed before this ran"_message, name()));
    return;
  }
  if (item.operation != nullptr) return run(*item.operation, item);
  item.event.wait(Deadline::at(TimePoint::max()));  // it comes: every operation ends
  if (Status status = item.event.status(); !status.ok()) progress_->fail(item.ticket, std::move(status));
}

void ThreadStream::await_all(const Operation& operation, uint64_t number) {
  const Deadline deadline = Deadline::after(operation.timeout.value_or(timeout_));
  for (const auto& condition : operation.after) {
    await(*condition, deadline);
    note_wait(operation, number, *condition);
  }
}

void ThreadStream::run(const Operation& operation, const Item& item) {
  try {
    if (!operation.after.empty()) await_all(operation, item.number);
    const TraceSpan span(operation.name, {.subject = operation.subject, .bytes = operation.bytes});
    const TimePoint passed = link_ == nullptr ? TimePoint() : link_->take(operation.bytes);
    const bool recorded = device().recorder().on();
    const uint64_t begin = recorded ? ticks() : 0;
    if (operation.body) operation.body();
    if (link_ != nullptr) sleep_until(passed);
    if (recorded) device().recorder().ran(actor(), item.number, begin, ticks());
  } catch (...) {
    progress_->fail(item.ticket, failure_of(operation));
  }
}

void ThreadStream::sleep_until(TimePoint when) {
  const Deadline end = Deadline::at(when);
  while (!end.passed()) {
    const uint32_t rung = bell_.load();
    if (dropping_.load()) return;
    futex_wait(bell_, rung, end);
  }
}

}  // namespace tessera::device
