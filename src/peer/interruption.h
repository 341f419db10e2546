// Ends waits of a bus for other ranks: those in progress (Bus::interrupt()), or those and all later ones
// (BusOptions::stop).
#pragma once

#include <functional>
#include <stop_token>

#include "base/mutex.h"

namespace tessera {

// Thread-safe.
class Interruption {
 public:
  // Once `stop` is requested, all tokens are stopped, also those that are taken later.
  explicit Interruption(const std::stop_token& stop) : stop_(stop), on_stop_(stop, [this] { interrupt(); }) {}
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  // A call takes a token as it begins, and ends once that is stopped.
  std::stop_token token() const {
    const MutexLock lock(mutex_);
    return present_.get_token();
  }

  // Stops the tokens that were taken so far.
  void interrupt() {
    std::stop_source taken(std::nostopstate);
    {
      const MutexLock lock(mutex_);
      taken = present_;
      if (!stop_.stop_requested()) present_ = std::stop_source();
    }
    taken.request_stop();  // not under the lock: it runs the callbacks of the waiting threads
  }

 private:
  const std::stop_token stop_;
  mutable Mutex mutex_;
  std::stop_source present_ GUARDED_BY(mutex_);
  const std::stop_callback<std::function<void()>> on_stop_;
};

// A stop token that is stopped once one of two others is. Thread-safe.
class EitherStop {
 public:
  EitherStop(const std::stop_token& one, const std::stop_token& other) : on_one_(one, stop_), on_other_(other, stop_) {}
  EitherStop(const EitherStop&) = delete;
  EitherStop& operator=(const EitherStop&) = delete;

  std::stop_token token() const { return source_.get_token(); }

 private:
  std::stop_source source_;
  const std::function<void()> stop_ = [this] { source_.request_stop(); };
  const std::stop_callback<std::function<void()>> on_one_, on_other_;
};

}  // namespace tessera
