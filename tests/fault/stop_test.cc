// Peers that are stopped (SIGSTOP, a debugger). A rank that waits for one is told at once, and the transfers go on when
// the peer does. Ranks wait for peers that are only slow.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/testing.h"
#include "peer/stop_detector.h"
#include "tests/support/fixture.h"

namespace tessera::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Stop : public JobsTest {
 protected:
  void start(const Side& side, const Body& body) { pids_[side.who()] = JobsTest::start(side, body); }
  // Waits until all others have ended, with an error that names the stopped rank.
  void expect_stopped_is_named(const std::string& stopped, std::initializer_list<const char*> others) {
    for (const char* name : others) {
      const Outcome outcome = of(name);
      EXPECT_EQ(outcome.status, kPeerLost) << name << ": " << outcome.output;
      EXPECT_THAT(outcome.output, HasSubstr(fmt::format("{} (pid {}) is stopped", stopped, pids_.at(stopped))));
    }
    ::kill(pids_.at(stopped), SIGCONT);
    const Outcome outcome = of(stopped);
    EXPECT_EQ(outcome.status, kPeerLost) << outcome.output;  // the others have given it up
    EXPECT_EQ(left_folders(), 0);
  }

  std::map<std::string, pid_t> pids_;
};

// A body that stops its own process before it runs `body`.
Body stopping_first(const Body& body) {
  return [=](Batch& batch, std::vector<float>& tensor) {
    ::raise(SIGSTOP);
    return body(batch, tensor);
  };
}

TEST_F(Stop, OfASenderEndsWhatWaitsForIt) {
  start(trainer(0), send_once);
  start(trainer(1), stopping_first(send_once));
  start(inference(0), receive_once);
  start(inference(1), receive_once);
  expect_stopped_is_named("trainer/1", {"inference/0", "inference/1", "trainer/0"});
}

TEST_F(Stop, OfAReceiverEndsWhatWaitsForIt) {
  start(trainer(0), send_once);
  start(trainer(1), send_once);
  start(staged(inference(0)), receive_once);
  start(staged(inference(1)), stopping_first(receive_once));
  expect_stopped_is_named("inference/1", {"trainer/0", "trainer/1", "inference/0"});
}

TEST_F(Stop, OfTheRankThatChoosesEndsAWaitForAVersion) {
  start(trainer(0, 1), stopping_first(send_once));
  start(inference(0, 1), [](Batch& batch, std::vector<float>&) { return static_cast<int>(batch.wait_version(1)); });
  expect_stopped_is_named("trainer/0", {"inference/0"});
}

TEST_F(Stop, OfARankThatHasYetToRegisterEndsTheRegistration) {
  pids_["trainer/1"] = JobsTest::start(trainer(1), [](Pair& pair) {
    ::raise(SIGSTOP);
    std::vector<float> tensor = local_tensor(trainer(1));
    (void)register_tensor(pair, trainer(1), tensor.data());
    return 0;
  });
  start(trainer(0), send_once);
  start(inference(0), receive_once);
  start(inference(1), receive_once);
  expect_stopped_is_named("trainer/1", {"trainer/0", "inference/0", "inference/1"});
}

// The same processes and batches go on.
TEST_F(Stop, IsOverWhenThePeerGoesOn) {
  struct Board {
    std::atomic<int> lost;
  };
  const Shared<Board> board;
  const Signal stopped;
  const auto until_it_goes_well = [&](const std::function<void()>& transfer) {
    while (!went_well(transfer)) {
      if (board->lost.fetch_add(1) == 0) stopped.raise();
    }
  };
  for (const Side& side : {trainer(0), trainer(1), staged(inference(0)), staged(inference(1))})
    start(side, [=](Batch& batch, std::vector<float>& tensor) {
      if (side.job == "inference" && side.rank == 1) ::raise(SIGSTOP);
      if (side.sends) {
        fill(side, tensor, 7);
        until_it_goes_well([&] { batch.send(7, kAttempt).wait(); });
        return 0;
      }
      until_it_goes_well([&] { batch.recv({}, kAttempt).wait(); });
      return holds(side, tensor, 7) && !batch.torn() ? 0 : 5;
    });
  stopped.wait();
  ::kill(pids_.at("inference/1"), SIGCONT);
  expect_all_well();
}

// A receiver that is stopped while it reads is given up, and the sender may overwrite the memory. What the receiver
// reads then is not a version, and without a digest it must still report that.
TEST_F(Stop, OfAReaderLeavesNoMixedVersionThatCountsAsWhole) {
  const auto large = [](Side side) {
    side.shape = {4096, 4096};
    side.digest = false;
    return side;
  };
  const Signal reading;
  const Signal overwritten;
  start(large(trainer(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    std::ranges::fill(tensor, 1.0F);
    (void)went_well([&] { batch.send(1, kAttempt).wait(); });  // it succeeds if the reader is quick
    std::ranges::fill(tensor, 2.0F);
    overwritten.raise();
    return 0;
  });
  start(large(inference(0, 1)), [&](Batch& batch, std::vector<float>& tensor) {
    Handle handle = batch.recv({}, kPatience);
    while (handle.progress().bytes_done == 0) std::this_thread::yield();
    reading.raise();
    if (went_well([&] { handle.wait(); })) {
      REQUIRE_HERE(!batch.torn() && std::ranges::count(tensor, 1.0F) == std::ssize(tensor) - 1);  // one is not of it
    } else {
      REQUIRE_HERE(batch.torn() && batch.version() == 0);
    }
    return 0;
  });
  reading.wait();
  ::kill(pids_.at("inference/0"), SIGSTOP);
  overwritten.wait();
  ::kill(pids_.at("inference/0"), SIGCONT);
  expect_all_well();
}

// The sender's process runs, but sends nothing for longer than it takes to notice a stop.
TEST_F(Stop, IsNotSeenInAPeerThatIsSlow) {
  start(trainer(0, 1), [](Batch& batch, std::vector<float>&) {
    std::this_thread::sleep_for(5 * kSilence);
    batch.send().wait();
    return 0;
  });
  start(inference(0, 1), receive_once);
  expect_all_well();
}

TEST(StopDetector, BelievesWhatItSeesTwice) {
  ProcessGroup group;
  const Shared<std::atomic<uint64_t>> started;
  const Signal ready;
  const pid_t pid = group.start("child", [&] {
    *started = Incarnation::self().start_time;
    ready.raise();
    while (true) ::pause();
    return 0;
  });
  ready.wait();
  Incarnation child = Incarnation::self();
  child.pid = pid;
  child.start_time = *started;
  const auto signal_and_await = [&](int signal, bool stopped) {
    ::kill(pid, signal);
    for (const Deadline deadline = soon(); is_stopped(child) != stopped && !deadline.passed();) ::sched_yield();
  };
  StopDetector watch;
  EXPECT_TRUE(watch.look("child", child).ok());
  signal_and_await(SIGSTOP, true);
  EXPECT_TRUE(watch.look("child", child).ok());
  signal_and_await(SIGCONT, false);
  EXPECT_TRUE(watch.look("child", child).ok());
  signal_and_await(SIGSTOP, true);
  EXPECT_TRUE(watch.look("child", child).ok());
  EXPECT_THAT(watch.look("child", child).message(), AllOf(HasSubstr("is stopped"), HasSubstr("kill -CONT")));
  child.start_time += 1;  // as if another process had its pid now
  EXPECT_TRUE(watch.look("child", child).ok());
}

}  // namespace
}  // namespace tessera::test
