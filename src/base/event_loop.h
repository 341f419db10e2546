// A thread that waits in epoll for descriptors, timers and posted tasks, and runs their callbacks one after another.
//
// Any thread may call post() and stop(). Everything else belongs to the loop's thread, and to the owner before start()
// and after stop(). Callbacks may add, change and remove anything, themselves included. A callback that was removed is
// not called again, not even for an event that had already been seen. Callbacks must not block.
//
// An exception that leaves a callback is logged as an error and goes no further: the task or timer counts as done, and
// a descriptor's callback is removed (otherwise it would be called again immediately). Callbacks that have more to do
// on an error, such as closing a connection, catch it themselves.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mutex.h"

namespace tessera {

class EventLoop {
 public:
  using Task = std::function<void()>;
  using FdCallback = std::function<void(uint32_t events)>;  // any of EPOLLIN, EPOLLOUT, EPOLLHUP, ...
  using TimerId = uint64_t;                                 // 0: no timer

  // `name` is the thread's name. Timers follow `clock`; advance a FakeClock in a posted task.
  explicit EventLoop(std::string name, const Clock& clock = Clock::steady());
  // Stops.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Starts the thread; call it once. Every line that the thread logs carries `fields`, whose texts must outlive the
  // loop.
  void start(std::vector<LogField> fields = {});
  // Ends the thread after the callback in progress and all tasks posted so far, and joins it. Idempotent; do not call
  // it on the loop's thread. If start() was never called, the tasks are destroyed.
  void stop();
  // Runs `task` on the loop's thread, after the tasks posted before it. After stop() it returns false and destroys the
  // task.
  bool post(Task task);
  // Whether the caller is the loop's thread.
  bool on_thread() const { return std::this_thread::get_id() == thread_id_; }

  // Level-triggered. The loop does not own fd; remove it before you close it.
  void add_fd(int fd, uint32_t events, FdCallback callback);
  void set_events(int fd, uint32_t events);
  void remove_fd(int fd);  // no effect if it is not registered

  TimerId add_timer(TimePoint when, Task task);
  TimerId add_timer_after(Duration delay, Task task) {
    return add_timer(Deadline::after(delay, clock_).when(), std::move(task));
  }
  void cancel_timer(TimerId id);  // no effect if it has run or never existed

  const Clock& clock() const { return clock_; }

 private:
  struct Watched {
    int fd;
    uint32_t events;
    FdCallback callback;
  };

  void run();
  bool stopping();
  void run_tasks();
  void run_timers();
  void dispatch(uint64_t id, uint32_t events);
  void guarded(const char* what, const Task& task);
  int timeout_ms() const;

  const std::string name_;
  const Clock& clock_;
  UniqueFd epoll_;
  UniqueFd wake_;  // eventfd, written by post() and stop()

  Mutex mutex_;
  std::vector<Task> tasks_ GUARDED_BY(mutex_);
  std::vector<Task> running_;  // empty between rounds; keeps its heap memory for the next one
  bool stopping_ GUARDED_BY(mutex_) = false;

  std::unordered_map<int, uint64_t> ids_;  // descriptor numbers are reused, so events carry an id
  std::unordered_map<uint64_t, std::shared_ptr<Watched>> watched_;
  std::pmr::unsynchronized_pool_resource pool_;
  std::pmr::map<std::pair<TimePoint, TimerId>, Task> timers_{&pool_};
  std::pmr::unordered_map<TimerId, TimePoint> timer_times_{&pool_};
  uint64_t next_id_ = 1;

  std::thread thread_;
  std::atomic<std::thread::id> thread_id_;
};

}  // namespace tessera
