// How much CPU a process spends on meeting two jobs' other ranks, which is to grow little with their number.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tools/bench/transfer.h"

namespace tessera::bench {

// Two jobs of as many ranks each. Every rank is a process that joins the pair and registers the same tensors, rows to
// rows, so that each has one rank to read from, however many there are.
struct Crowd {
  std::string name;  // "register/8+8"
  int world = 0;     // of each job
};
inline constexpr int kCrowdTensors = 300;
inline constexpr double kCrowdTarget = 1.5;  // times what a process of the first crowd spends

inline std::array<Crowd, 2> all_crowds() {
  return {Crowd{"register/8+8", 8}, Crowd{"register/32+32", 32}};
}

struct CrowdTimes {
  std::vector<double> cpu_seconds;  // of a process on average, once a repetition: from its start until it is attached
  std::vector<double> seconds;      // until the last one is
};

// Throws what the first process to fail threw. REQUIRES: the calling process has one thread.
void time_crowd(const Crowd& crowd, const Meeting& meeting, CrowdTimes& times);

}  // namespace tessera::bench
