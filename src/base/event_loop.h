// A thread that waits in epoll for descriptors, timers and posted tasks, and runs their callbacks one after another.
//
// Only post() and stop() may be called from any thread. Everything else belongs to the loop's thread, and to the owner
// before start() and after stop(). Callbacks may add, change and remove anything, themselves included; a callback that
// was removed is not called any more, not even for an event that had been noticed already. Callbacks must not block.
//
// An exception out of a callback is logged as an error and goes no further: the task or timer counts as done, and a
// descriptor's callback is removed (else it would be called again at once). Callbacks that can say what else must
// happen, such as closing a connection, catch for themselves.
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
  using FdCallback = std::function<void(uint32_t events)>;  // EPOLLIN, EPOLLOUT, EPOLLHUP, ... that hold
  using TimerId = uint64_t;                                 // 0 is no timer

  // `name` is the thread's. Timers follow `clock`; one that stands still must be moved in a posted task.
  explicit EventLoop(std::string name, const Clock& clock = Clock::steady());
  // Stops.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Starts the thread. Once. Every line that it logs carries `fields`, whose texts must outlive the loop.
  void start(std::vector<LogField> fields = {});
  // Ends the thread, after the callback in progress and all tasks posted so far, and joins it. Idempotent; not to be
  // called on the loop's thread. Without start() the tasks are destroyed.
  void stop();
  // Runs `task` on the loop's thread, after those posted before. False, and the task is destroyed, after stop().
  bool post(Task task);
  // Whether the caller is the loop's thread.
  bool on_thread() const { return std::this_thread::get_id() == thread_id_; }

  // Level-triggered. The loop does not own fd; remove it before it is closed.
  void add_fd(int fd, uint32_t events, FdCallback callback);
  void set_events(int fd, uint32_t events);
  void remove_fd(int fd);  // nothing happens if it is not there

  TimerId add_timer(TimePoint when, Task task);
  TimerId add_timer_after(Duration delay, Task task) {
    return add_timer(Deadline::after(delay, clock_).when(), std::move(task));
  }
  void cancel_timer(TimerId id);  // nothing happens if it has run or never was

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
  std::vector<Task> running_;  // empty between rounds: what posts and timers take from the heap is kept for the next
  bool stopping_ GUARDED_BY(mutex_) = false;

  std::unordered_map<int, uint64_t> ids_;  // a descriptor's number may be reused: events carry the id
  std::unordered_map<uint64_t, std::shared_ptr<Watched>> watched_;
  std::pmr::unsynchronized_pool_resource pool_;
  std::pmr::map<std::pair<TimePoint, TimerId>, Task> timers_{&pool_};
  std::pmr::unordered_map<TimerId, TimePoint> timer_times_{&pool_};
  uint64_t next_id_ = 1;

  std::thread thread_;
  std::atomic<std::thread::id> thread_id_;
};

}  // namespace tessera
