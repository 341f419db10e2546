// A link or a copy engine with so many bytes a second, which streams of a CPU share: it stands in for one in
// measurements and tests.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "base/mutex.h"

namespace tessera::device {

// Thread-safe.
class Link {
 public:
  explicit Link(double bytes_per_second, const Clock& clock = Clock::steady())
      : seconds_a_byte_(1 / bytes_per_second), clock_(clock) {}

  // Takes the link for so many bytes, behind those that have it: when the last one has passed. A paced operation ends
  // no earlier.
  TimePoint take(int64_t bytes) {
    const MutexLock lock(mutex_);
    free_at_ = std::max(free_at_, clock_.now()) + seconds(static_cast<double>(bytes) * seconds_a_byte_);
    return free_at_;
  }

 private:
  const double seconds_a_byte_;
  const Clock& clock_;
  Mutex mutex_;
  TimePoint free_at_ GUARDED_BY(mutex_){};
};

}  // namespace tessera::device
