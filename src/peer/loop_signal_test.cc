#include "peer/loop_signal.h"

#include <gtest/gtest.h>

#include <future>
#include <optional>

namespace tessera {
namespace {

class LoopSignalTest : public testing::Test {
 protected:
  LoopSignalTest() { loop_.start(); }
  // Returns once the loop has handled everything that was posted so far.
  void settle() {
    std::promise<void> seen;
    loop_.post([&] { seen.set_value(); });
    seen.get_future().wait();
  }

  EventLoop loop_{"signal-test"};
  int calls_ = 0;  // on the loop's thread
  std::optional<LoopSignal> signal_{std::in_place, loop_, [this] { ++calls_; }};
};

TEST_F(LoopSignalTest, EachRaiseThatWasSeenIsOneCall) {
  for (int raise = 1; raise <= 3; ++raise) {
    signal_->raise();
    settle();
    EXPECT_EQ(calls_, raise);
  }
}

TEST_F(LoopSignalTest, RaisesBeforeTheCallAreOne) {
  loop_.post([this] {
    signal_->raise();
    signal_->raise();
  });
  settle();
  settle();
  EXPECT_EQ(calls_, 1);
}

TEST_F(LoopSignalTest, ADestroyedSignalIsNotServed) {
  loop_.post([this] {
    signal_->raise();
    signal_.reset();
  });
  settle();
  settle();
  EXPECT_EQ(calls_, 0);
}

TEST_F(LoopSignalTest, AStoppedLoopIsNotWaitedFor) {
  loop_.stop();
  signal_->raise();
  EXPECT_EQ(calls_, 0);
}

}  // namespace
}  // namespace tessera
