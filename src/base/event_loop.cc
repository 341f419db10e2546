#include "base/event_loop.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "base/fail.h"
#include "base/log.h"
#include "base/thread.h"

namespace tessera {
namespace {

constexpr uint64_t kWakeId = 0;

void control(int epoll, int operation, int fd, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, operation, fd, &event) != 0) fail_errno("epoll_ctl");
}

}  // namespace

EventLoop::EventLoop(std::string name, const Clock& clock)
    : name_(std::move(name)),
      clock_(clock),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_ || !wake_) fail_errno("epoll_create1 or eventfd");
  control(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWakeId);
}

EventLoop::~EventLoop() {
  stop();
}

void EventLoop::start(std::vector<LogField> fields) {
  TESSERA_CHECK(!thread_.joinable());
  thread_ = start_thread(name_, [this, fields = std::move(fields)] {
    const LogScope scope{std::span(fields)};
    run();
  });
}

void EventLoop::stop() {
  TESSERA_CHECK(!on_thread());
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));  // fails only if it is set already
  if (thread_.joinable()) thread_.join();
}

bool EventLoop::post(Task task) {
  bool first = false;
  {
    const MutexLock lock(mutex_);
    if (stopping_) return false;
    first = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  const uint64_t one = 1;
  if (first) (void)!::write(wake_.get(), &one, sizeof(one));
  return true;
}

void EventLoop::add_fd(int fd, uint32_t events, FdCallback callback) {
  const uint64_t id = next_id_++;
  control(epoll_.get(), EPOLL_CTL_ADD, fd, events, id);
  ids_[fd] = id;
  watched_[id] = std::make_shared<Watched>(Watched{.fd = fd, .events = events, .callback = std::move(callback)});
}

void EventLoop::set_events(int fd, uint32_t events) {
  const auto id = ids_.find(fd);
  TESSERA_CHECK(id != ids_.end());
  Watched& watched = *watched_.at(id->second);
  if (watched.events == events) return;
  control(epoll_.get(), EPOLL_CTL_MOD, fd, events, id->second);
  watched.events = events;
}

void EventLoop::remove_fd(int fd) {
  const auto id = ids_.find(fd);
  if (id == ids_.end()) return;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  watched_.erase(id->second);
  ids_.erase(id);
}

EventLoop::TimerId EventLoop::add_timer(TimePoint when, Task task) {
  const TimerId id = next_id_++;
  timers_[{when, id}] = std::move(task);
  timer_times_[id] = when;
  return id;
}

void EventLoop::cancel_timer(TimerId id) {
  const auto time = timer_times_.find(id);
  if (time == timer_times_.end()) return;
  timers_.erase({time->second, id});
  timer_times_.erase(time);
}

int EventLoop::timeout_ms() const {
  return timers_.empty() ? -1 : Deadline::at(timers_.begin()->first.first).poll_ms(clock_);
}

void EventLoop::run() {
  thread_id_ = std::this_thread::get_id();
  std::array<epoll_event, 64> events;
  while (!stopping()) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms());
    for (int i = 0; i < count && !stopping(); ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kWakeId) {
        run_tasks();
      } else {
        dispatch(event.data.u64, event.events);
      }
    }
    if (!stopping()) run_timers();
  }
  run_tasks();
  thread_id_ = std::thread::id();
}

bool EventLoop::stopping() {
  const MutexLock lock(mutex_);
  return stopping_;
}

void EventLoop::run_tasks() {
  uint64_t ignored = 0;
  (void)!::read(wake_.get(), &ignored, sizeof(ignored));
  {
    const MutexLock lock(mutex_);
    running_.swap(tasks_);
  }
  for (Task& task : running_) {
    guarded("a task", task);
    task = nullptr;  // release what the task holds before the next one runs: somebody may be waiting for it
  }
  running_.clear();
}

void EventLoop::run_timers() {
  const TimePoint now = clock_.now();
  const TimerId end = next_id_;  // timers added from here on run in the next round, after its descriptors
  while (!timers_.empty() && timers_.begin()->first.first <= now && timers_.begin()->first.second < end) {
    const auto timer = timers_.extract(timers_.begin());
    timer_times_.erase(timer.key().second);
    guarded("a timer", timer.mapped());
  }
}

void EventLoop::dispatch(uint64_t id, uint32_t events) {
  const auto found = watched_.find(id);
  if (found == watched_.end()) return;  // an earlier callback removed it
  const std::shared_ptr<Watched> watched = found->second;
  try {
    watched->callback(events);
  } catch (...) {
    log_event(LogLevel::err, "callback.failed", {}, "{}: descriptor {} is given up: {}"_message, name_, watched->fd,
              status_of_current_exception().message());
    if (watched_.contains(id)) remove_fd(watched->fd);
  }
}

void EventLoop::guarded(const char* what, const Task& task) {
  try {
    task();
  } catch (...) {
    log_event(LogLevel::err, "callback.failed", {}, "{}: {} failed: {}"_message, name_, what,
              status_of_current_exception().message());
  }
}

}  // namespace tessera
