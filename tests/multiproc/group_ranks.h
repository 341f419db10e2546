// Ranks of an ETP group that are real processes: each trains a weight of a few rows, until it is told to stop or
// something happens to one of them.
#pragma once

#include <atomic>
#include <string>

#include "base/clock.h"
#include "tests/support/harness.h"

namespace tessera::test {

inline constexpr int kMostGroupRanks = 4;

// What the ranks of one group and the test have in common, in shared memory.
struct GroupBoard {
  struct Blob {
    std::atomic<uint32_t> bytes{0};
    char text[4096];
  };
  Blob blobs[kMostGroupRanks];
  std::atomic<uint64_t> steps[kMostGroupRanks];  // whole ones; the first says that the group has formed
  std::atomic<bool> stop{false};
};

struct GroupRank {
  int rank = 0;
  int size = 2;
  Duration timeout = std::chrono::seconds(60);
  bool checks_footprint = true;  // that nothing of the group is left in the process
};

// The body of a process. Returns 0 if all ranks have stopped as they were told; throws the group's error. Aborts if a
// value is wrong, if the rank's own rows have changed, or if something is left over.
int train(const GroupRank& options, GroupBoard& board);

}  // namespace tessera::test
