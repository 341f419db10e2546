#include "peer/peer_watch.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/testing.h"
#include "peer/alarm.h"
#include "peer/peer_testing.h"

namespace tessera {
namespace {

class PeerWatchTest : public testing::Test {
 protected:
  void SetUp() override { loop_.start(); }

  std::function<void()> changed() {
    return [this] {
      const MutexLock lock(mutex_);
      ++changes_;
      came_.notify_all();
    };
  }
  bool await(int changes) {
    const MutexLock lock(mutex_);
    return came_.wait_until(mutex_, soon(), [&]() REQUIRES(mutex_) { return changes_ >= changes; });
  }

  Mutex mutex_;
  CondVar came_;
  int changes_ GUARDED_BY(mutex_) = 0;
  EventLoop loop_{"test"};
};

TEST_F(PeerWatchTest, AnEndIsTold) {
  IdleProcess first, second;
  const PeerWatch watch(loop_, {first.peer(), second.peer()}, changed());
  second.kill();
  EXPECT_TRUE(await(1));
  EXPECT_TRUE(watch.stopped(0).ok());
  EXPECT_TRUE(watch.stopped(1).ok());
  EXPECT_EQ(liveness_of(second.incarnation()), Liveness::kDead);
  first.kill();
  EXPECT_TRUE(await(2));
}

TEST_F(PeerWatchTest, SoIsOneThatWasBefore) {
  IdleProcess process;
  process.kill();
  const PeerWatch watch(loop_, {process.peer()}, changed());
  EXPECT_TRUE(await(1));
}

TEST_F(PeerWatchTest, AProcessThatIsStoppedIsFound) {
  const IdleProcess process;
  process.stop();
  const PeerWatch watch(loop_, {process.peer()}, changed());
  EXPECT_TRUE(await(1));
  EXPECT_EQ(watch.stopped(0).code(), ErrorCode::kPeerLost);
}

TEST_F(PeerWatchTest, SoIsAWorkerThatIs) {
  const IdleProcess agent, worker;
  worker.stop();
  PeerWatch::Peer peer = agent.peer();
  peer.worker = worker.incarnation();
  const PeerWatch watch(loop_, {peer}, changed());
  EXPECT_TRUE(await(1));
  EXPECT_NE(watch.stopped(0).message().find("the worker of trainer/0"), std::string::npos);
}

TEST_F(PeerWatchTest, NothingIsToldOrHeldOnceItIsDestroyed) {
  IdleProcess process;
  const size_t before = open_fds();
  {
    const PeerWatch watch(loop_, {process.peer()}, [] { FAIL(); });
  }
  process.kill();
  loop_.stop();
  EXPECT_EQ(open_fds(), before);
}

TEST(AlarmTest, ARingEndsTheWaitThatWasArmedBeforeAndNoneThatIsArmedSince) {
  Alarm alarm;
  const std::stop_token first = alarm.arm();
  EXPECT_FALSE(first.stop_requested());
  alarm.ring();
  alarm.ring();
  EXPECT_TRUE(first.stop_requested());
  const std::stop_token second = alarm.arm();
  EXPECT_FALSE(second.stop_requested());
  EXPECT_EQ(alarm.arm(), second);
  alarm.ring();
  EXPECT_TRUE(second.stop_requested());
}

}  // namespace
}  // namespace tessera
