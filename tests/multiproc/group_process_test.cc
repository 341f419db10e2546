// A group of real processes: what happens to it when one of them is killed or stopped, at any moment. The normal lane
// does it a few times, the slow one (TESSERA_SLOW_LANE) hundreds of times.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <thread>

#include "base/process.h"
#include "base/runtime_dir.h"
#include "tests/multiproc/group_ranks.h"

namespace tessera::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;

#ifdef TESSERA_SLOW_LANE
constexpr int kTimes = 300;
#else
constexpr int kTimes = 20;
#endif

constexpr int kLost = 10 + static_cast<int>(ErrorCode::kPeerLost);
constexpr int kLate = 10 + static_cast<int>(ErrorCode::kDeadlineExceeded);

class GroupProcesses : public testing::Test {
 protected:
  void start(int size, Duration timeout) {
    for (int rank = 0; rank < size; ++rank)
      pids_.push_back(processes_.start(std::to_string(rank), [=, this] {
        return train({.rank = rank, .size = size, .timeout = timeout}, *board_);
      }));
  }
  // Waits until the rank has given its blob, or has done so many steps.
  void await_blob(int rank) {
    while (board_->blobs[rank].bytes.load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  void await_steps(int rank, uint64_t steps) {
    while (board_->steps[rank].load() < steps) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  std::string name(int rank) const {
    return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid(rank)) + ")";
  }
  // Folders of processes that were killed while the group formed are removed when the next one opens the root.
  void expect_nothing_left() {
    const std::string root = processes_.folder() + "/run";
    if (!RuntimeDir::folders(root).empty()) RuntimeDir::prepare_root(root);
    EXPECT_THAT(processes_.left_over(), IsEmpty());
  }

  Shared<GroupBoard> board_;
  ProcessGroup processes_;
  std::vector<pid_t> pids_;
};

TEST_F(GroupProcesses, TrainAndLeaveInGoodOrder) {
  start(4, std::chrono::seconds(60));
  for (int rank = 0; rank < 4; ++rank) await_steps(rank, 20);
  board_->stop = true;
  for (const Outcome& outcome : processes_.wait(hang_limit())) EXPECT_EQ(outcome.status, 0) << outcome.output;
  expect_nothing_left();
}

// A moment of a group's life, as a seed chooses it: while it forms, or in some step.
void await_moment(std::mt19937& random, const std::function<void()>& blob, const std::function<void(uint64_t)>& steps) {
  random() % 3 == 0 ? blob() : steps(random() % 6);
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
}

TEST(GroupFaults, AKilledRankIsNamedByAllOthers) {
  for (int time = 0; time < kTimes; ++time) {
    class Run final : public GroupProcesses {
     public:
      void TestBody() override {}
      void run(int time) {
        std::mt19937 random(static_cast<uint32_t>(time));
        const int size = 2 + time % 3;
        const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
        start(size, std::chrono::seconds(60));
        await_moment(random, [&] { await_blob(victim); }, [&](uint64_t steps) { await_steps(victim, steps); });
        processes_.kill(pid(victim), SIGKILL);
        const auto outcomes = processes_.wait(hang_limit());
        for (int rank = 0; rank < size; ++rank) {
          const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
          EXPECT_EQ(outcome.status, rank == victim ? -SIGKILL : kLost) << "rank " << rank << ": " << outcome.output;
          if (rank != victim) EXPECT_THAT(outcome.output, HasSubstr(name(victim) + " has died"));
        }
        expect_nothing_left();
      }
    };
    SCOPED_TRACE(time);
    Run().run(time);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(GroupFaults, AStoppedRankIsNamedAtTheDeadline) {
  for (int time = 0; time < kTimes; ++time) {
    class Run final : public GroupProcesses {
     public:
      void TestBody() override {}
      void run(int time) {
        std::mt19937 random(static_cast<uint32_t>(time));
        const int size = 2 + time % 3;
        const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
        start(size, std::chrono::seconds(2));
        await_moment(random, [&] { await_blob(victim); }, [&](uint64_t steps) { await_steps(victim, steps); });
        processes_.kill(pid(victim), SIGSTOP);
        std::vector<pid_t> others = pids_;
        others.erase(others.begin() + victim);
        for (const Outcome& outcome : processes_.wait(others, hang_limit())) {
          EXPECT_THAT(outcome.status, AnyOf(kLate, kLost)) << outcome.output;
          EXPECT_THAT(outcome.output, HasSubstr(name(victim) + " is stopped"));
        }
        // Once it goes on, it learns why the group has failed.
        processes_.kill(pid(victim), SIGCONT);
        const Outcome outcome = processes_.wait_for(pid(victim), hang_limit());
        EXPECT_THAT(outcome.status, AnyOf(kLate, kLost)) << outcome.output;
        expect_nothing_left();
      }
    };
    SCOPED_TRACE(time);
    Run().run(time);
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::test
