#include "peer/interruption.h"

#include <gtest/gtest.h>

#include <latch>
#include <thread>

namespace tessera {
namespace {

TEST(Interruption, StopsWhatWasTakenAndNothingLater) {
  Interruption interruption({});
  const std::stop_token first = interruption.token();
  const std::stop_token second = interruption.token();
  EXPECT_FALSE(first.stop_requested());
  interruption.interrupt();
  EXPECT_TRUE(first.stop_requested());
  EXPECT_TRUE(second.stop_requested());
  const std::stop_token later = interruption.token();
  EXPECT_FALSE(later.stop_requested());
  interruption.interrupt();
  EXPECT_TRUE(later.stop_requested());
}

TEST(Interruption, OfAStopIsForGood) {
  std::stop_source stop;
  Interruption interruption(stop.get_token());
  interruption.interrupt();
  const std::stop_token taken = interruption.token();
  EXPECT_FALSE(taken.stop_requested());
  stop.request_stop();
  EXPECT_TRUE(taken.stop_requested());
  EXPECT_TRUE(interruption.token().stop_requested());
  interruption.interrupt();
  EXPECT_TRUE(interruption.token().stop_requested());
  EXPECT_TRUE(Interruption(stop.get_token()).token().stop_requested());
}

TEST(Interruption, ThatComesWithAStopDoesNotUndoIt) {
  for (int round = 0; round < 200; ++round) {
    std::stop_source stop;
    Interruption interruption(stop.get_token());
    std::latch both(2);
    std::jthread interrupts([&] {
      both.arrive_and_wait();
      interruption.interrupt();
    });
    both.arrive_and_wait();
    stop.request_stop();
    interrupts.join();
    ASSERT_TRUE(interruption.token().stop_requested()) << "round " << round;
  }
}

}  // namespace
}  // namespace tessera
