// Wakes a thread from waits that take a stop token, as often as needed.
#pragma once

#include <stop_token>

#include "base/mutex.h"

namespace tessera {

// Thread-safe. A thread arms it, checks what may have changed, and then waits: it misses no ring after arm().
class Alarm {
 public:
  // Forgets earlier rings. The next ring stops the token.
  std::stop_token arm() {
    const MutexLock lock(mutex_);
    if (next_.stop_requested()) next_ = std::stop_source();
    return next_.get_token();
  }

  void ring() {
    std::stop_source armed(std::nostopstate);
    {
      const MutexLock lock(mutex_);
      armed = next_;
    }
    armed.request_stop();  // not under the lock: it runs the callbacks of the waiting threads
  }

 private:
  Mutex mutex_;
  std::stop_source next_ GUARDED_BY(mutex_);
};

}  // namespace tessera
