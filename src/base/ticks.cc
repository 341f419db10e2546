#include "base/ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera {

bool has_tick_counter() {
#if defined(__x86_64__)
  constexpr unsigned kPowerManagement = 0x8000'0007;
  constexpr unsigned kInvariantTsc = 1U << 8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(kPowerManagement, &eax, &ebx, &ecx, &edx) != 0 && (edx & kInvariantTsc) != 0;
#elif defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

// The closest of a few attempts: a thread may be put aside between the two readings.
TickMark TickMark::now() {
  constexpr int kAttempts = 4;
  TickMark closest;
  uint64_t least = UINT64_MAX;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const uint64_t before = tessera::ticks();
    const TimePoint time = Clock::steady().now();
    const uint64_t took = tessera::ticks() - before;
    if (took >= least) continue;
    least = took;
    closest = {.ticks = before + took / 2, .time = time};
  }
  return closest;
}

TickScale::TickScale(const TickMark& begin, const TickMark& end) : end_(end) {
  if (end.ticks > begin.ticks && end.time > begin.time)
    tick_ = static_cast<double>((end.time - begin.time).count()) / static_cast<double>(end.ticks - begin.ticks);
}

}  // namespace tessera
