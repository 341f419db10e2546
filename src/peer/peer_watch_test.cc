#include "peer/peer_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <span>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/mutex.h"
#include "base/testing.h"
#include "peer/alarm.h"

namespace tessera {
namespace {

// A process that does nothing, until it is killed.
class IdleProcess {
 public:
  IdleProcess() {
    int told[2];
    EXPECT_EQ(::pipe(told), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      const std::vector<std::byte> out = message_bytes(Incarnation::self());
      (void)!::write(told[1], out.data(), out.size());
      while (true) ::pause();
    }
    std::array<std::byte, 512> bytes{};
    const ssize_t got = ::read(told[0], bytes.data(), bytes.size());
    const std::span<const std::byte> told_bytes(bytes.data(), static_cast<size_t>(got));
    incarnation_ = read_message<Incarnation>(told_bytes, "the child");
    ::close(told[0]);
    ::close(told[1]);
  }
  ~IdleProcess() { kill(); }
  void kill() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void stop() const {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  PeerWatch::Peer peer() const { return {.name = "trainer/0", .process = incarnation_, .worker = {}}; }
  const Incarnation& incarnation() const { return incarnation_; }

 private:
  pid_t pid_ = 0;
  Incarnation incarnation_;
};

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
