#include "tests/fault/wall_clock.h"

#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace tessera::test {
namespace {

std::atomic<const std::atomic<int64_t>*> wall_clock_shift{nullptr};

}  // namespace

WallClock::WallClock() {
  wall_clock_shift = &*shift_;
}

WallClock::~WallClock() {
  wall_clock_shift = nullptr;
}

}  // namespace tessera::test

// These replace the C library's functions, for every shared library, too.
extern "C" {

int clock_gettime(clockid_t id, timespec* now) noexcept {
  const auto status = static_cast<int>(::syscall(SYS_clock_gettime, id, now));
  const auto* shift = tessera::test::wall_clock_shift.load();
  if (shift != nullptr && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift->load();
  return status;
}

int gettimeofday(timeval* __restrict now, void* __restrict) noexcept {
  timespec exact{};
  const int status = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return status;
}

time_t time(time_t* out) noexcept {
  timespec exact{};
  (void)clock_gettime(CLOCK_REALTIME, &exact);
  if (out != nullptr) *out = exact.tv_sec;
  return exact.tv_sec;
}
}
