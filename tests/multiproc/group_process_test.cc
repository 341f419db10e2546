// A group of real processes: what happens to it when one of them is killed or stopped, at any moment. The normal lane
// does it a few times, the slow one (TESSERA_SLOW_LANE) hundreds of times.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
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

class GroupProcesses {
 public:
  void start(int size, Duration timeout) {
    for (int rank = 0; rank < size; ++rank)
      pids_.push_back(processes_.start(std::to_string(rank), [=, this] {
        return train({.rank = rank, .size = size, .timeout = timeout}, *board_);
      }));
  }
  // A moment of the rank's life: while the group forms, or in some step.
  void await_moment(int rank, std::mt19937& random) {
    if (random() % 3 == 0) {
      await([&] { return board_->blobs[rank].bytes.load() > 0; });
    } else {
      const uint64_t steps = random() % 6;
      await([&] { return board_->steps[rank].load() >= steps && board_->blobs[rank].bytes.load() > 0; });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
  }

  void stop_after(uint64_t steps) {
    for (size_t rank = 0; rank < pids_.size(); ++rank) await([&] { return board_->steps[rank].load() >= steps; });
    board_->stop = true;
    for (const Outcome& outcome : processes_.wait(hang_limit())) EXPECT_EQ(outcome.status, 0) << outcome.output;
    expect_nothing_left();
  }
  // One that stands still from the moment that it is known until all others have ended for the victim's death.
  void kill_while_one_is_late(int victim, int late) {
    for (size_t rank = 0; rank < pids_.size(); ++rank) await([&] { return board_->blobs[rank].bytes.load() > 0; });
    processes_.kill(pid(late), SIGSTOP);
    processes_.kill(pid(victim), SIGKILL);
    std::vector<pid_t> others = pids_;
    std::erase(others, pid(late));
    std::erase(others, pid(victim));
    auto outcomes = processes_.wait(others, hang_limit());
    processes_.kill(pid(late), SIGCONT);
    outcomes.push_back(processes_.wait_for(pid(late), hang_limit()));
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.status, kLost) << outcome.output;
      EXPECT_THAT(outcome.output, HasSubstr(name(victim) + " has died"));
    }
    expect_nothing_left();
  }
  // All others must end well before their deadlines.
  void kill(int victim) {
    processes_.kill(pid(victim), SIGKILL);
    const auto outcomes = processes_.wait(hang_limit());
    const double death = seconds_of_death(outcomes);
    for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
      const Outcome& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_EQ(outcome.status, rank == victim ? -SIGKILL : kLost) << "rank " << rank << ": " << outcome.output;
      if (rank == victim) continue;
      EXPECT_THAT(outcome.output, HasSubstr(name(victim) + " has died"));
      longest_ = std::max(longest_, outcome.seconds - death);
    }
    expect_nothing_left();
  }
  // Seconds from the death to the end of the last process.
  double longest() const { return longest_; }
  void stop_and_continue(int victim) {
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

 private:
  static void await(const std::function<bool()>& come) {
    const auto limit = Deadline::after(hang_limit());
    while (!come() && !limit.passed()) std::this_thread::sleep_for(std::chrono::microseconds(100));
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

  double longest_ = 0;
  Shared<GroupBoard> board_;
  ProcessGroup processes_;
  std::vector<pid_t> pids_;
};

TEST(GroupFaults, RanksTrainAndLeaveInGoodOrder) {
  GroupProcesses group;
  group.start(4, std::chrono::seconds(60));
  group.stop_after(20);
}

TEST(GroupFaults, AKilledRankIsNamedByAllOthers) {
  double longest = 0;
  for (uint32_t time = 0; time < kTimes && !testing::Test::HasFailure(); ++time) {
    SCOPED_TRACE(time);
    std::mt19937 random(time);
    const int size = 2 + static_cast<int>(time % 3);
    const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
    GroupProcesses group;
    group.start(size, std::chrono::seconds(60));
    group.await_moment(victim, random);
    group.kill(victim);
    longest = std::max(longest, group.longest());
  }
  testing::Test::RecordProperty("seconds_from_death_to_the_last_end", std::to_string(longest));
}

TEST(GroupFaults, WhoSeesADeathLateNamesNotOnlyThoseThatEndedForIt) {
  for (uint32_t time = 0; time < kTimes && !testing::Test::HasFailure(); ++time) {
    SCOPED_TRACE(time);
    GroupProcesses group;
    group.start(4, std::chrono::seconds(60));
    group.kill_while_one_is_late(static_cast<int>(3 - time % 2), static_cast<int>(time % 2));
  }
}

// Fewer times than the others: each takes the whole deadline, which is long enough for ranks that are merely slow.
TEST(GroupFaults, AStoppedRankIsNamedAtTheDeadline) {
  for (uint32_t time = 0; time < kTimes / 2 && !testing::Test::HasFailure(); ++time) {
    SCOPED_TRACE(time);
    std::mt19937 random(time);
    const int size = 2 + static_cast<int>(time % 3);
    const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
    GroupProcesses group;
    group.start(size, std::chrono::seconds(3));
    group.await_moment(victim, random);
    group.stop_and_continue(victim);
  }
}

}  // namespace
}  // namespace tessera::test
