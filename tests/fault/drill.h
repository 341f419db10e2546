// Two jobs that transfer one version after the other while a test kills and stops their processes: what is transferred,
// what each rank does, and what is known of them, in memory that they all share.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "tessera/bus.h"
#include "tests/support/harness.h"
#include "tests/support/random_case.h"

namespace tessera::test {

inline constexpr int kMostRanks = 3;  // of a job

// What a drill transfers, and how: a function of its seed.
struct DrillPlan {
  uint64_t seed = 0;
  int senders = 1;
  int receivers = 1;
  bool auto_store = false;
  BatchOptions sender, receiver;
  bool stages = false;                                  // a staged receiver: stage() and commit(), one after the other
  std::string pull = {};                                // TESSERA_FORCE_PULL
  bool sender_agents = false, receiver_agents = false;  // daemons
  // A tensor that takes a while, and random ones.
  std::string bulk_src = {}, bulk_dst = {};
  bool bulk_src_shared = false, bulk_dst_shared = false;
  std::vector<RandomCase> cases = {};
  Timeout patience = std::chrono::seconds(3);  // of each call

  static DrillPlan random(uint64_t seed);
  std::string to_string() const;
};

// What all processes of a drill know of a rank.
struct RankBoard {
  std::atomic<int64_t> reported;                 // sender: the last step that it is done with
  std::atomic<int64_t> good;                     // the last version that went well
  std::atomic<uint32_t> losses;                  // operations that ended with a loss
  std::atomic<uint32_t> torn;                    // receiver: after how many of them what it holds was mixed
  std::atomic<uint32_t> fds, threads, mappings;  // its Footprint after the last good one
  // Receiver: the versions that it took, one after the other; kKilled where its process was.
  static constexpr int64_t kKilled = -1;
  static constexpr size_t kMostTaken = 1 << 15;
  std::atomic<uint32_t> taken_count;
  std::array<std::atomic<int64_t>, kMostTaken> taken;

  void log(int64_t version);
  std::vector<int64_t> taken_so_far() const;
};

struct Board {
  std::atomic<uint32_t> changes;     // a futex
  std::atomic<uint64_t> operations;  // begun, by anyone
  std::atomic<int64_t> step;         // what the senders send now
  std::atomic<uint32_t> renewals;    // receivers close their batch, and register again, each time this grows
  std::atomic<bool> stop;
  std::atomic<int> senders_gone;  // since then
  std::atomic<bool> failed;       // a process has ended otherwise than it should
  std::array<RankBoard, kMostRanks> senders, receivers;

  void changed();
  template <typename Predicate>
  bool await(Predicate predicate, const Deadline& deadline) const {
    while (true) {
      const uint32_t seen = changes.load();
      if (predicate()) return true;
      if (deadline.passed()) return false;
      wait_for_change(seen, deadline);
    }
  }
  void wait_for_change(uint32_t seen, const Deadline& deadline) const;
};

// A rank's part, in a process of its own, until the drill is stopped. What it checks, it throws as kInternal.
int run_sender(const DrillPlan& plan, Board& board, const std::string& store, Rank rank);
int run_receiver(const DrillPlan& plan, Board& board, const std::string& store, Rank rank);

}  // namespace tessera::test
