// Time that tests can replace, and the deadline that every wait carries.
#pragma once

#include <chrono>

namespace tessera {

using Duration = std::chrono::nanoseconds;
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Duration>;

// Monotonic time. Implementations are thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint now() const = 0;
  // CLOCK_MONOTONIC. It lives as long as the process.
  static const Clock& steady();
};

// A clock that stands still until it is advanced; for tests. Thread-compatible.
class FakeClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{std::chrono::hours(1)};
};

// The moment at which a wait gives up. A value.
class Deadline {
 public:
  // A timeout beyond the end of time means no deadline.
  static Deadline after(Duration timeout, const Clock& clock = Clock::steady()) {
    const TimePoint now = clock.now();
    return Deadline(timeout < TimePoint::max() - now ? now + timeout : TimePoint::max());
  }
  static Deadline at(TimePoint when) { return Deadline(when); }

  TimePoint when() const { return when_; }
  bool passed(const Clock& clock = Clock::steady()) const { return clock.now() >= when_; }
  Duration left(const Clock& clock = Clock::steady()) const {
    const Duration left = when_ - clock.now();
    return left > Duration::zero() ? left : Duration::zero();
  }
  // Milliseconds left, rounded up, as poll() and epoll_wait() take them.
  int poll_ms(const Clock& clock = Clock::steady()) const {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left(clock)).count();
    return ms > 3'600'000 ? 3'600'000 : static_cast<int>(ms);
  }

 private:
  explicit Deadline(TimePoint when) : when_(when) {}
  TimePoint when_;
};

inline constexpr Duration seconds(double s) {
  return Duration(static_cast<Duration::rep>(s * 1e9));
}
inline constexpr double to_seconds(Duration d) {
  return static_cast<double>(d.count()) * 1e-9;
}

}  // namespace tessera
