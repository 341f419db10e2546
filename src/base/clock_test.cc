#include "base/clock.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(ClockTest, ADeadlineCountsDownAndPasses) {
  FakeClock clock;
  const Deadline deadline = Deadline::after(seconds(1), clock);
  EXPECT_FALSE(deadline.passed(clock));
  EXPECT_EQ(deadline.left(clock), seconds(1));

  clock.advance(seconds(0.75));
  EXPECT_DOUBLE_EQ(to_seconds(deadline.left(clock)), 0.25);
  clock.advance(seconds(0.25));
  EXPECT_TRUE(deadline.passed(clock));
  clock.advance(seconds(10));
  EXPECT_EQ(deadline.left(clock), Duration::zero());
}

TEST(ClockTest, PollTimeIsRoundedUpSoThatNobodySpinsThroughTheLastMillisecond) {
  FakeClock clock;
  EXPECT_EQ(Deadline::after(Duration(1), clock).poll_ms(clock), 1);
  EXPECT_EQ(Deadline::after(Duration(1'000'001), clock).poll_ms(clock), 2);
  EXPECT_EQ(Deadline::after(Duration::zero(), clock).poll_ms(clock), 0);
  EXPECT_GT(Deadline::after(std::chrono::hours(100'000), clock).poll_ms(clock), 0);
}

TEST(ClockTest, ATimeoutBeyondTheEndOfTimeNeverPasses) {
  for (const Duration endless : {Duration::max(), Duration::max() - Duration(1)}) {
    const Deadline deadline = Deadline::after(endless);
    EXPECT_FALSE(deadline.passed());
    EXPECT_GT(deadline.poll_ms(), 0);
  }
}

TEST(ClockTest, SteadyTimeDoesNotGoBack) {
  const TimePoint before = Clock::steady().now();
  EXPECT_LE(before, Clock::steady().now());
}

}  // namespace
}  // namespace tessera
