// Two jobs that transfer one version after another while a test kills and stops their processes: what they transfer,
// what each rank does, and what all know of each other, in shared memory.
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

// What a drill transfers, and how. It depends only on the seed.
struct DrillPlan {
  uint64_t seed = 0;
  int senders = 1;
  int receivers = 1;
  bool auto_store = false;
  BatchOptions sender, receiver;
  bool stages = false;                                  // a staged receiver calls stage() and then commit()
  std::string pull = {};                                // TESSERA_FORCE_PULL
  bool sender_agents = false, receiver_agents = false;  // daemons
  // A tensor whose transfer takes a while, and random ones.
  std::string bulk_src = {}, bulk_dst = {};
  bool bulk_src_shared = false, bulk_dst_shared = false;
  std::vector<RandomCase> cases = {};
  Timeout patience = std::chrono::seconds(3);  // of each call

  static DrillPlan random(uint64_t seed);
  std::string to_string() const;
};

// What all processes of a drill know about a rank.
struct RankBoard {
  std::atomic<int64_t> reported;                 // sender: the last step that it is done with
  std::atomic<int64_t> good;                     // the last version whose transfer succeeded
  std::atomic<uint32_t> losses;                  // operations that ended with a loss
  std::atomic<uint32_t> torn;                    // receiver: after how many of them its tensors were mixed
  std::atomic<uint32_t> fds, threads, mappings;  // its Footprint after the last success
  // Receiver: the versions that it took, in order; kKilled where its process was killed.
  static constexpr int64_t kKilled = -1;
  static constexpr size_t kMostTaken = 1 << 15;
  std::atomic<uint32_t> taken_count;
  std::array<std::atomic<int64_t>, kMostTaken> taken;

  void log(int64_t version);
  std::vector<int64_t> taken_so_far() const;
};

struct Board {
  std::atomic<uint32_t> changes;     // a futex
  std::atomic<uint64_t> operations;  // that any rank has begun
  std::atomic<int64_t> step;         // the version that the senders send now
  std::atomic<uint32_t> renewals;    // each time this grows, receivers close their batch and register again
  std::atomic<bool> stop;
  std::atomic<int> senders_gone;  // after `stop`
  std::atomic<bool> failed;       // a process has failed
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

// A rank's part, in a separate process, until the drill is stopped. If a check fails it throws kInternal.
int run_sender(const DrillPlan& plan, Board& board, const std::string& store, Rank rank);
int run_receiver(const DrillPlan& plan, Board& board, const std::string& store, Rank rank);

}  // namespace tessera::test
