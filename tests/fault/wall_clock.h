// A test's wall clock, which it can set back and forth, for this process and those that it forks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "tests/support/harness.h"

namespace tessera::test {

// While one exists, everything in this program that reads CLOCK_REALTIME (std::chrono::system_clock, time(),
// gettimeofday()) gets its time. Only one may exist at a time.
class WallClock {
 public:
  WallClock();
  ~WallClock();
  WallClock(const WallClock&) = delete;
  WallClock& operator=(const WallClock&) = delete;
  void jump(std::chrono::seconds by) const { *shift_ += by.count(); }

 private:
  Shared<std::atomic<int64_t>> shift_;
};

}  // namespace tessera::test
