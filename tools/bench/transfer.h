// Transfers between real processes over the real bus, timed.
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
  double register_seconds = 0;  // of the slowest rank
  double first_seconds = 0;
  std::vector<double> seconds;  // of each repetition, after the first transfer and one warm-up
};

// Where the ranks of one case meet.
struct Meeting {
  std::string store;       // URL
  std::string name_space;  // not used by any other case
};

// Runs kSources and kDestinations processes, one thread each for either end's work. A transfer's time is that from the
// first source's call of send(), which all ranks have waited for together, until the last destination has its part.
// Throws what the first process to fail threw, behind its name. REQUIRES: the calling process has one thread.
TransferTimes run_transfer(const Case& c, int repeat, const Meeting& meeting);

// Kills one process while the other side's ranks wait for a transfer: seconds from the signal until the slowest of them
// has its error. Throws if one of them ends otherwise. REQUIRES: the calling process has one thread.
double time_death(Victim victim, const Meeting& meeting);

}  // namespace tessera::bench
