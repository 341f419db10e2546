// Whether a schedule is right whatever its timing: two accesses to the same bytes, one of which writes, must be ordered
// by events, words, collectives or the host (order.h). Looks at the logs of all ranks together, so it also finds a
// missing edge that no run has ever stumbled over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/record/rank_log.h"
#include "device/record/record.h"

namespace tessera::device {

// One of two accesses that conflict.
struct ConflictSide {
  int rank = 0;
  uint64_t sequence = 0;  // of the record in that rank's log
  std::string actor;      // "stream gather of rank 1"
  std::string operation;  // "gather wte.weight"
  bool write = false;
  uint64_t version = 0;

  bool operator==(const ConflictSide&) const = default;
};

struct Conflict {
  // In the order that was meant, as far as the logs tell: that of one rank's log, or of the versions, a read of version
  // v coming after the write of v and before that of v + 1.
  ConflictSide first, second;
  RegionId region{};
  std::string memory;  // the region's label; "private memory of rank 0"
  uint64_t begin = 0;  // the bytes that both access: [begin, end) of the region
  uint64_t end = 0;
  std::string missing;  // which edge would have ordered them

  // Several lines without a line break at the end.
  std::string to_string() const;
};

struct CheckReport {
  std::vector<Conflict> conflicts;  // of different pairs of accesses; by the first's and second's rank and sequence
  bool more = false;                // whether there are others
  // Why the logs do not fit together. Conflicts are real nevertheless, but `unreached` records were not checked.
  std::vector<std::string> faults;
  std::vector<std::string> unfinished;  // operations that had not begun when the recording ended: no fault
  size_t records = 0;
  size_t accesses = 0;
  size_t unreached = 0;

  bool ok() const { return conflicts.empty() && faults.empty(); }
};

struct CheckOptions {
  size_t most_conflicts = 1000;
};

// Checks the logs of all ranks of one run, in any order. Exact: reports all pairs that are unordered, up to the limit,
// and no other. Takes time in proportion to records x (1 + streams / 16) or so, plus the conflicts. Throws kMismatch if
// the logs are not those of all ranks of one run.
CheckReport check_schedule(std::span<const RankLog> logs, const CheckOptions& options = {});

}  // namespace tessera::device
