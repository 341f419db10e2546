// A counter that costs less than half of what a clock does, for times that are taken often and told later.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "base/clock.h"

namespace tessera {

// Whether the processor has a counter of one rate that ticks() can read: the invariant TSC of x86-64 (CPUID
// 8000'0007h, EDX bit 8), the generic timer of 64-bit Arm.
bool has_tick_counter();

// That counter; without one, CLOCK_MONOTONIC in nanoseconds. Thread-safe. Counters of several CPUs may differ by what
// the machine's firmware lets them: ticks are good for figures, and order nothing.
inline uint64_t ticks() {
  static const bool counter = has_tick_counter();
  if (!counter) return static_cast<uint64_t>(Clock::steady().now().time_since_epoch().count());
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t now = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return 0;
#endif
}

// One moment, by both.
struct TickMark {
  uint64_t ticks = 0;
  TimePoint time{};

  static TickMark now();
};

// The straight line through two moments. A value.
class TickScale {
 public:
  TickScale() = default;  // a tick is a nanosecond
  TickScale(const TickMark& begin, const TickMark& end);

  TimePoint time_of(uint64_t ticks) const {
    const auto since = static_cast<double>(static_cast<int64_t>(ticks - end_.ticks));
    return end_.time + Duration(static_cast<Duration::rep>(since * tick_));
  }

 private:
  TickMark end_{};
  double tick_ = 1;  // in nanoseconds
};

}  // namespace tessera
