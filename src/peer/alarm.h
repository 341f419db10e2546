// Wakes a thread from a wait that takes a stop token, again and again.
#pragma once

#include <stop_token>

#include "base/mutex.h"

namespace tessera {

// Thread-safe. Who waits arms it, looks at what may have changed, and waits: what rings since is not missed.
class Alarm {
 public:
  // Forgets what has rung so far; the token is stopped by the next ring.
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
    armed.request_stop();  // not under the lock: it calls whoever waits
  }

 private:
  Mutex mutex_;
  std::stop_source next_ GUARDED_BY(mutex_);
};

}  // namespace tessera
