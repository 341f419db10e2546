// How much CPU a process spends to join and register with the ranks of two jobs. It should grow little with the number.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "tools/bench/transfer.h"

namespace tessera::bench {

// Two jobs of the same world. Every rank is a process that joins the pair and registers the same tensors, rows to rows,
// so that each rank reads from one other rank, however many there are.
struct Crowd {
  std::string name;  // "register/8+8"
  int world = 0;     // of each job
};
inline constexpr int kCrowdTensors = 300;
inline constexpr double kCrowdTarget = 1.5;  // limit, as a multiple of what a process of the first crowd spends

inline std::array<Crowd, 2> all_crowds() {
  return {Crowd{"register/8+8", 8}, Crowd{"register/32+32", 32}};
}

struct CrowdTimes {
  std::vector<double> cpu_seconds;  // by repetition: the average of the processes, from start until attached
  std::vector<double> seconds;      // by repetition: until the last process is attached
};

// Throws the error of the first process that fails. REQUIRES: the calling process has one thread.
void time_crowd(const Crowd& crowd, const Meeting& meeting, CrowdTimes& times);

}  // namespace tessera::bench
