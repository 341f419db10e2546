#include "base/mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "base/testing.h"

namespace tessera {
namespace {

// Whether another thread can lock the mutex.
bool is_free(Mutex& mutex) {
  return std::async(std::launch::async,
                    [&] {
                      if (!mutex.try_lock()) return false;
                      mutex.unlock();
                      return true;
                    })
      .get();
}

TEST(MutexTest, AScopeHoldsItAndMayLetItGoBefore) {
  Mutex mutex;
  {
    MutexLock lock(mutex);
    EXPECT_FALSE(is_free(mutex));
    {
      const MutexUnlock unlocked(mutex);
      EXPECT_TRUE(is_free(mutex));
    }
    EXPECT_FALSE(is_free(mutex));
    lock.unlock();
    EXPECT_TRUE(is_free(mutex));
    lock.lock();
    EXPECT_FALSE(is_free(mutex));
    lock.unlock();
  }
  EXPECT_TRUE(is_free(mutex));
}

// The state that a thread waits for, with either kind of variable.
template <typename Variable>
struct Awaited {
  void set() {
    const MutexLock lock(mutex);
    there = true;
    changed.notify_all();
  }

  Mutex mutex;
  Variable changed;
  bool there GUARDED_BY(mutex) = false;
};

TEST(CondVarTest, AWaitEndsWhenItsPredicateHoldsWhateverItsDeadline) {
  for (const Deadline& deadline : {soon(), Deadline::after(Duration::max())}) {
    Awaited<CondVar> awaited;
    const std::jthread other([&] { awaited.set(); });
    const MutexLock lock(awaited.mutex);
    EXPECT_TRUE(
        awaited.changed.wait_until(awaited.mutex, deadline, [&]() REQUIRES(awaited.mutex) { return awaited.there; }));
    EXPECT_FALSE(is_free(awaited.mutex));
  }
}

TEST(CondVarTest, AWaitEndsAtItsDeadlineWithTheMutexHeld) {
  Awaited<CondVar> awaited;
  const Deadline deadline = Deadline::after(seconds(0.01));
  const MutexLock lock(awaited.mutex);
  EXPECT_FALSE(
      awaited.changed.wait_until(awaited.mutex, deadline, [&]() REQUIRES(awaited.mutex) { return awaited.there; }));
  EXPECT_TRUE(deadline.passed());
  EXPECT_FALSE(is_free(awaited.mutex));
}

TEST(StoppableCondVarTest, AWaitEndsByWhatComesFirst) {
  Awaited<StoppableCondVar> awaited;
  const auto there = [&]() REQUIRES(awaited.mutex) { return awaited.there; };
  std::stop_source stop;
  {
    const std::jthread other([&] { stop.request_stop(); });
    const MutexLock lock(awaited.mutex);
    EXPECT_FALSE(awaited.changed.wait(awaited.mutex, stop.get_token(), there));
    EXPECT_FALSE(awaited.changed.wait_until(awaited.mutex, {}, Deadline::after(seconds(0.01)), there));
  }
  const std::jthread other([&] { awaited.set(); });
  const MutexLock lock(awaited.mutex);
  EXPECT_TRUE(awaited.changed.wait_until(awaited.mutex, {}, Deadline::after(Duration::max()), there));
}

}  // namespace
}  // namespace tessera
