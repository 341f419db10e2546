// The failure of a group, as one rank knows it. The first counts.
#pragma once

#include <atomic>

#include "base/mutex.h"
#include "tessera/error.h"

namespace tessera::collective {

// Thread-safe.
class Failure {
 public:
  // Whether it is the first.
  bool set(const Status& status) {
    const MutexLock lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    status_ = status;
    failed_.store(true, std::memory_order_release);
    return true;
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const {
    const MutexLock lock(mutex_);
    return status_;
  }
  void require_none() const {
    if (failed()) status().throw_if_error();
  }

 private:
  std::atomic<bool> failed_{false};
  mutable Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
};

}  // namespace tessera::collective
