#include "device/condition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <thread>

#include "device/cpu_device.h"
#include "device/testing.h"

namespace tessera::device {
namespace {

TEST(Await, EndsWhenTheConditionIsMet) {
  TestWord word;
  std::thread other([&] { word.set(3); });
  await(*word.reaches(3, "the word"), soon());
  EXPECT_EQ(word.get(), 3u);
  other.join();
  EXPECT_EQ(error_of([] { await(LostCondition(), soon()); }), "peer-lost: rank 2 is gone");
}

class Stopped final : public Condition {
 public:
  bool met() const override { return false; }
  void sleep(const Deadline&) const override {}
  std::string to_string() const override { return "rank 2 to publish version 7 of w"; }
  std::string explain() const override { return "rank 2 (pid 71) is stopped"; }
};

TEST(Await, SaysAtTheDeadlineWhatItWaitedForAndWhy) {
  EXPECT_THAT(error_of([] { await(Stopped(), Deadline::after(Duration::zero())); }),
              testing::MatchesRegex("deadline-exceeded: waited .* s for rank 2 to publish version 7 of w: rank 2 "
                                    "\\(pid 71\\) is stopped"));
}

// As Python's Ctrl-C does it: the handler notes the signal, the hook throws.
volatile sig_atomic_t signals_seen = 0;

void throw_if_signalled(void*) {
  if (signals_seen != 0) throw Error(ErrorCode::kCancelled, "interrupted");
}

class WaitHookTest : public testing::Test {
 protected:
  WaitHookTest() {
    signals_seen = 0;
    struct sigaction action{};
    action.sa_handler = [](int) { signals_seen = 1; };  // without SA_RESTART
    ::sigaction(SIGUSR1, &action, &before_);
  }
  ~WaitHookTest() override { ::sigaction(SIGUSR1, &before_, nullptr); }

  // What `wait` throws once a signal has come.
  template <typename Wait>
  std::string interrupted(Wait wait) {
    const pthread_t waiting = ::pthread_self();
    std::thread other([=] { ::pthread_kill(waiting, SIGUSR1); });
    const WaitHook hook(&throw_if_signalled);
    const std::string text = error_of(wait);
    other.join();
    return text;
  }

  CpuDevice device_;
  TestWord gate_;
  struct sigaction before_{};
};

TEST_F(WaitHookTest, EndsWaitsForConditions) {
  EXPECT_EQ(interrupted([&] { device_.wait_host(*gate_.reaches(1, "the gate"), soon()); }), "cancelled: interrupted");
}

TEST_F(WaitHookTest, EndsWaitsForStreams) {
  const auto stream = device_.make_stream({.name = "gather"});
  stream->enqueue({.name = "gather", .after = {gate_.reaches(1, "the gate")}});
  EXPECT_EQ(interrupted([&] { stream->synchronize(soon()); }), "cancelled: interrupted");
  gate_.set(1);
  stream->synchronize(soon());
}

TEST_F(WaitHookTest, FailsTheInlineOperationThatWaits) {
  const auto stream = device_.caller();
  EXPECT_EQ(interrupted([&] {
              stream->enqueue({.name = "gather", .subject = "w", .after = {gate_.reaches(1, "the gate")}});
              stream->synchronize(soon());
            }),
            "cancelled: gather w: interrupted");
  EXPECT_EQ(stream->take_error().code(), ErrorCode::kCancelled);
}

TEST(WaitHook, TheInnermostCountsAndNoneIsNeeded) {
  int outer = 0, inner = 0;
  const auto count = [](void* calls) { ++*static_cast<int*>(calls); };
  WaitHook::woken();
  const WaitHook first(count, &outer);
  {
    const WaitHook second(count, &inner);
    WaitHook::woken();
  }
  WaitHook::woken();
  EXPECT_EQ(outer, 1);
  EXPECT_EQ(inner, 1);
}

TEST(WaitHook, WakesItsThreadNowAndThen) {
  const Deadline far = Deadline::at(TimePoint::max());
  EXPECT_EQ(WaitHook::next_wake(far).when(), far.when());
  const WaitHook hook([](void*) {});
  const TimePoint next = WaitHook::next_wake(far).when();
  EXPECT_LE(next, Deadline::after(WaitHook::kWakeEvery).when());
  const Deadline near = Deadline::after(Duration::zero());
  EXPECT_EQ(WaitHook::next_wake(near).when(), near.when());
}

}  // namespace
}  // namespace tessera::device
