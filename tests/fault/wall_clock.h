// The wall clock of this process and of those that it forks, set back and forth by a test.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "tests/support/harness.h"

namespace tessera::test {

// While one lives, whoever reads CLOCK_REALTIME (std::chrono::system_clock, time(), gettimeofday()) in this program
// sees it. One at a time.
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
