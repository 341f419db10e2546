// The processes of two jobs and their store are killed or stopped, one after another, at random points of registration
// and transfer, and come back. Nobody hangs, no mixed version counts as whole, nothing is left behind, and the
// transfers go on.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/runtime_dir.h"
#include "tessera/store.h"
#include "tests/fault/drill.h"
#include "tests/support/agents.h"

namespace tessera::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSanitizers = 10;
#else
constexpr int kSanitizers = 1;
#endif
#ifdef TESSERA_SLOW_LANE
constexpr int kRounds = 300 / kSanitizers;
constexpr uint64_t kFirstSeed = 1000;
#else
constexpr int kRounds = 20 / kSanitizers;
constexpr uint64_t kFirstSeed = 1;
#endif
constexpr int kRoundsOfDrill = 4;  // rounds with the same processes

// A process that can be lost, and comes back.
enum class Role { kSender, kReceiver, kSenderAgent, kReceiverAgent, kStore };
struct Actor {
  Role role;
  Rank rank = 0;
  auto operator<=>(const Actor&) const = default;
  bool transfers() const { return role == Role::kSender || role == Role::kReceiver; }
  std::string name() const {
    switch (role) {
      case Role::kSender:
        return fmt::format("trainer/{}", rank);
      case Role::kReceiver:
        return fmt::format("inference/{}", rank);
      case Role::kSenderAgent:
        return fmt::format("trainer/{}'s agent", rank);
      case Role::kReceiverAgent:
        return fmt::format("inference/{}'s agent", rank);
      case Role::kStore:
        break;
    }
    return "store";
  }
};

enum class Fault { kKill, kStop, kStopThenKill };

class Drill {
 public:
  explicit Drill(uint64_t seed) : plan_(DrillPlan::random(seed)), random_(~seed) {
    board_->step = 1;
    for (Rank rank = 0; rank < plan_.senders; ++rank) actors_.push_back({Role::kSender, rank});
    for (Rank rank = 0; rank < plan_.receivers; ++rank) actors_.push_back({Role::kReceiver, rank});
    for (Rank rank = 0; rank < plan_.senders && plan_.sender_agents; ++rank)
      actors_.push_back({Role::kSenderAgent, rank});
    for (Rank rank = 0; rank < plan_.receivers && plan_.receiver_agents; ++rank)
      actors_.push_back({Role::kReceiverAgent, rank});
    if (!plan_.auto_store) {
      store_ = group_.start_store();
      actors_.push_back({Role::kStore});
    }
    for (const Actor& actor : actors_)
      if (actor.role != Role::kStore) start(actor);
  }

  void run(int rounds) {
    for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
      const Actor victim = actors_[random_() % actors_.size()];
      if (round > 0 || flip()) await_operation();
      pause_up_to(round == 0 ? 60 : 4);
      strike(victim, static_cast<Fault>(random_() % 3));
      while (random_() % 3 == 0) {  // while the victim registers
        pause_up_to(40);
        strike(victim, Fault::kKill);
      }
      await_recovery();
    }
    finish();
  }

 private:
  RankBoard& board_of(const Actor& actor) const {
    return (actor.role == Role::kSender ? board_->senders : board_->receivers)[static_cast<size_t>(actor.rank)];
  }
  bool flip() { return random_() % 2 == 0; }
  // Waits until a random moment. Nothing depends on how long it is.
  void pause_up_to(int milliseconds) {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<uint64_t>(1000 * milliseconds)));
  }
  void await_operation() const {
    const uint64_t seen = board_->operations;
    board_->await([&] { return board_->operations != seen || board_->failed; }, Deadline::after(hang_limit()));
  }

  void start(const Actor& actor) {
    if (actor.role == Role::kStore) {
      group_.start_store(store_);
      return;
    }
    pids_[actor] = group_.start(actor.name(), [this, actor] {
      if (!actor.transfers())
        return run_agent(actor.role == Role::kSenderAgent ? "trainer" : "inference", actor.rank, plan_.pull);
      const auto run = actor.role == Role::kSender ? run_sender : run_receiver;
      return run(plan_, *board_, store_, actor.rank);
    });
    bounds_.erase(actor);
  }
  void signal(const Actor& actor, int signal) {
    ::kill(actor.role == Role::kStore ? group_.store_pid() : pids_.at(actor), signal);
  }
  void strike(const Actor& actor, Fault fault) {
    static constexpr const char* kNames[] = {"kill", "stop", "stop and kill"};
    history_ += fmt::format("{}{} {}", history_.empty() ? "" : ", ", kNames[static_cast<int>(fault)], actor.name());
    if (fault != Fault::kKill) {
      signal(actor, SIGSTOP);
      pause_up_to(400);
    }
    if (fault == Fault::kStop) return signal(actor, SIGCONT);
    if (actor.role == Role::kStore) {
      group_.kill_store();
    } else {
      signal(actor, SIGKILL);
      const Outcome outcome = group_.wait_for(pids_.at(actor), hang_limit());
      EXPECT_EQ(outcome.status, -SIGKILL) << outcome.name << ": " << outcome.output;
      if (actor.role == Role::kReceiver) board_of(actor).log(RankBoard::kKilled);
    }
    pause_up_to(50);
    start(actor);
  }

  // Waits until every rank has done a transfer that began after now, and uses no more resources than the last time.
  void await_recovery() {
    const int64_t step = board_->step;
    const auto recovered = [&](const Actor& actor) {
      if (!actor.transfers()) return true;
      if (board_of(actor).good <= step) return false;
      const auto bound = bounds_.find(actor);
      return bound == bounds_.end() || footprint_of(actor).within(bound->second);
    };
    const bool all = board_->await([&] { return board_->failed || std::ranges::all_of(actors_, recovered); },
                                   Deadline::after(3 * hang_limit()));
    if (!all || board_->failed) {
      ADD_FAILURE() << (all ? "a process failed" : "not all have recovered") << " from step " << step << ":\n"
                    << state();
      return;
    }
    for (const Actor& actor : actors_) {
      if (!actor.transfers() || plan_.auto_store) continue;  // the host of the store uses more
      Footprint bound = footprint_of(actor);
      ++bound.threads;           // from the first loss on there is a thread that registers again
      ++bound.fds;               // the connection to the store, if that was away at this moment
      if (plan_.pull.empty()) {  // a peer that comes back measures its costs again, and may now use a stream
        const auto streams = static_cast<uint32_t>(actor.role == Role::kSender ? plan_.receivers : plan_.senders);
        bound.fds += streams;
        bound.threads += streams;
        bound.mappings += streams;
      }
      bounds_.try_emplace(actor, bound);
    }
  }
  Footprint footprint_of(const Actor& actor) const {
    const RankBoard& board = board_of(actor);
    return {.fds = board.fds, .threads = board.threads, .mappings = board.mappings};
  }
  std::string state() const {
    std::string text;
    for (const Actor& actor : actors_) {
      if (!actor.transfers()) continue;
      const RankBoard& board = board_of(actor);
      text += fmt::format("{}: good {}, reported {}, losses {}, {}", actor.name(), board.good.load(),
                          board.reported.load(), board.losses.load(), footprint_of(actor).to_string());
      const auto bound = bounds_.find(actor);
      text += bound == bounds_.end() ? "\n" : fmt::format(" (bound {})\n", bound->second.to_string());
    }
    return text;
  }

  void finish() {
    board_->stop = true;
    board_->changed();
    const std::chrono::seconds limit = testing::Test::HasFailure() ? std::chrono::seconds(1) : 3 * hang_limit();
    for (const Actor& actor : actors_)
      if (actor.transfers()) expect_good_end(group_.wait_for(pids_.at(actor), limit));
    for (const Actor& actor : actors_)
      if (!actor.transfers() && actor.role != Role::kStore) signal(actor, SIGTERM);
    for (const Outcome& outcome : group_.wait(limit)) expect_good_end(outcome);
    if (plan_.receiver.mode == Mode::kStaged) expect_equal_histories();
    group_.start("the next process", [auto_store = plan_.auto_store] {
      RuntimeDir::open();
      if (auto_store) open_store("auto")->close();
      return 0;
    });
    EXPECT_EQ(group_.wait(hang_limit()).front().status, 0);
    EXPECT_THAT(group_.left_over(), testing::IsEmpty());
    uint32_t losses = 0, torn = 0;
    for (const Actor& actor : actors_) {
      if (!actor.transfers()) continue;
      losses += board_of(actor).losses;
      torn += board_of(actor).torn;
    }
    std::printf("%s: %s; %ld versions, %u operations lost, %u left torn\n", plan_.to_string().c_str(), history_.c_str(),
                static_cast<long>(board_->step), losses, torn);
  }

  static void expect_good_end(const Outcome& outcome) {
    EXPECT_TRUE(outcome.status == 0 && !testing::Test::HasFailure())
        << outcome.name << " ended with " << outcome.status << ":\n"
        << outcome.output;
  }

  // If one rank took a version, every other rank took it, too, unless it was killed about then.
  void expect_equal_histories() const {
    for (Rank a = 0; a < plan_.receivers; ++a)
      for (Rank b = 0; b < plan_.receivers; ++b)
        for (const int64_t version : board_of({Role::kReceiver, a}).taken_so_far()) {
          if (version == RankBoard::kKilled || excused(board_of({Role::kReceiver, b}).taken_so_far(), version))
            continue;
          ADD_FAILURE() << "inference/" << a << " took version " << version << ", inference/" << b << " did not";
          return;
        }
  }
  // Whether `version` is in `taken`, or the rank was killed between the versions before and after it.
  static bool excused(const std::vector<int64_t>& taken, int64_t version) {
    bool killed = false;
    for (const int64_t one : taken) {
      if (one == RankBoard::kKilled) {
        killed = true;
        continue;
      }
      if (one >= version) return one == version || killed;
      killed = false;
    }
    return killed;
  }

  const DrillPlan plan_;
  std::mt19937_64 random_;
  const Shared<Board> board_;
  ProcessGroup group_;
  std::string store_ = "auto";
  std::vector<Actor> actors_;
  std::map<Actor, pid_t> pids_;
  std::map<Actor, Footprint> bounds_;  // for the processes that have recovered once
  std::string history_;
};

void drill(uint64_t seed, int rounds) {
  std::thread([] {}).join();  // with a process's first thread ThreadSanitizer starts one, too: it should do so now
  SCOPED_TRACE(DrillPlan::random(seed).to_string());
  Drill(seed).run(rounds);
}

// TESSERA_FAULT_SEED=1017 runs only that seed's drill.
TEST(Kill, AnyProcessAtAnyMomentAndTheTransfersGoOn) {
  if (const char* seed = std::getenv("TESSERA_FAULT_SEED")) return drill(std::stoull(seed), kRoundsOfDrill);
  for (int round = 0; round < kRounds && !HasFailure(); round += kRoundsOfDrill)
    drill(kFirstSeed + static_cast<uint64_t>(round / kRoundsOfDrill), std::min(kRoundsOfDrill, kRounds - round));
}

}  // namespace
}  // namespace tessera::test
