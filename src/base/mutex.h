// std::mutex, its locks and its condition variables, with annotations for Clang's thread safety analysis
// (thread_annotations.h).
//
// A wait names the mutex, which the caller holds; it is released during the wait and held again when the wait returns.
// Waits end at a Deadline of base/clock.h, on the steady clock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <utility>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace tessera {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex until it is destroyed or unlock() releases the mutex. Belongs to one thread.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Releases a mutex that the thread holds, until this object is destroyed.
class SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~MutexUnlock() RELEASE() { mutex_.lock(); }  // the analysis sees that the scope's end locks it again
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// All concurrent waits of one variable name the same mutex. Predicates are called with the mutex held, and again after
// a spurious wakeup.
class CondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  // May wake spuriously.
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // Likewise. False once the deadline has passed.
  bool wait_until(Mutex& mutex, const Deadline& deadline) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool woken = condition_.wait_until(lock, deadline.when()) == std::cv_status::no_timeout;
    lock.release();
    return woken;
  }

  // The predicate may require the mutex: the analysis cannot see that it is the same one.
  template <typename Predicate>
  void wait(Mutex& mutex, Predicate predicate) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    while (!predicate()) wait(mutex);
  }
  // Whether the predicate was true by the deadline.
  template <typename Predicate>
  bool wait_until(Mutex& mutex, const Deadline& deadline, Predicate predicate)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    while (!predicate())
      if (!wait_until(mutex, deadline)) return predicate();
    return true;
  }

 private:
  std::condition_variable condition_;
};

// A CondVar whose waits also end at a stop token, at the price of a second mutex.
class StoppableCondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  // Whether the predicate was true by the deadline or the stop.
  template <typename Predicate>
  bool wait_until(Mutex& mutex, const std::stop_token& stop, const Deadline& deadline, Predicate predicate)
      REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    return condition_.wait_until(mutex, stop, deadline.when(), std::move(predicate));
  }
  template <typename Predicate>
  bool wait(Mutex& mutex, const std::stop_token& stop, Predicate predicate) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    return condition_.wait(mutex, stop, std::move(predicate));
  }

 private:
  std::condition_variable_any condition_;
};

}  // namespace tessera
