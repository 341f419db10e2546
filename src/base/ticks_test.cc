#include "base/ticks.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Ticks, DoNotGoBack) {
  uint64_t last = ticks();
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t now = ticks();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(TickScale, IsTheLineThroughTwoMoments) {
  const TimePoint hour{std::chrono::hours(1)};
  const TickScale scale({.ticks = 1000, .time = hour}, {.ticks = 3000, .time = hour + Duration(500)});
  EXPECT_EQ(scale.time_of(1000), hour);
  EXPECT_EQ(scale.time_of(2000), hour + Duration(250));
  EXPECT_EQ(scale.time_of(3000), hour + Duration(500));
  EXPECT_EQ(scale.time_of(600), hour - Duration(100));
  EXPECT_EQ(scale.time_of(5000), hour + Duration(1000));
}

TEST(TickScale, NeedsTwoMoments) {
  const TickMark one = {.ticks = 7, .time = TimePoint(Duration(100))};
  EXPECT_EQ(TickScale(one, one).time_of(9), TimePoint(Duration(102)));
  EXPECT_EQ(TickScale().time_of(5), TimePoint(Duration(5)));
}

TEST(TickScale, TellsTheTimeOfTheClock) {
  const TickMark begin = TickMark::now();
  const TimePoint before = Clock::steady().now();
  const uint64_t between = ticks();
  const TimePoint after = Clock::steady().now();
  const TickScale scale(begin, TickMark::now());
  constexpr Duration kApart = std::chrono::milliseconds(1);  // far more than the two differ by
  EXPECT_GE(scale.time_of(between), before - kApart);
  EXPECT_LE(scale.time_of(between), after + kApart);
}

}  // namespace
}  // namespace tessera
