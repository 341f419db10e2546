// Times transfers between real processes over the real bus.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench/case.h"

namespace tessera::bench {

struct TransferTimes {
  int64_t bytes_moved = 0;  // by one transfer, all ranks
  int64_t bytes_lower_bound = 0;
  double register_seconds = 0;  // by the slowest rank
  double first_seconds = 0;
  std::vector<double> seconds;  // of each repetition, after the first transfer and one warm-up
  // Of Case::beside_plain: those of the transfers without digests.
  std::vector<double> plain_seconds{};
};

// The place where the ranks of one case join.
struct Meeting {
  std::string store;       // URL
  std::string name_space;  // different for each case
};

// Runs kSources + kDestinations processes, each with one thread that moves data. A transfer's time is from the first
// source's call of send(), which all ranks wait for together, until the last destination has its part. Throws the error
// of the first process that fails, after its name. REQUIRES: the calling process has one thread.
TransferTimes run_transfer(const Case& c, int repeat, const Meeting& meeting);

// Kills one process while the other side's ranks wait for a transfer. Returns the seconds from the signal until the
// slowest of them has its error. Throws if one of them ends otherwise. REQUIRES: the calling process has one thread.
double time_death(Victim victim, const Meeting& meeting);

}  // namespace tessera::bench
