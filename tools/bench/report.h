// The results of `tessera bench`, as a table and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tools/bench/case.h"
#include "tools/bench/crowd.h"
#include "tools/bench/transfer.h"

namespace tessera::bench {

struct Machine {
  std::string cpu;     // its model
  int cpus = 0;        // number that this process may use
  std::string kernel;  // "Linux 6.1.0"
  int64_t memory_bytes = 0;
  double load = 0;                  // average of the last minute before the benchmark
  std::vector<std::string> forced;  // "TESSERA_FORCE_PULL=stream"
};
Machine this_machine();

// Repetitions of one measurement, as rates in GB (10^9 bytes) of payload a second.
struct Rate {
  double median = 0;
  double least = 0;
  double most = 0;
};
// REQUIRES: `seconds` is not empty.
Rate rate_of(int64_t bytes, std::vector<double> seconds);

struct CaseResult {
  Case what;
  Status status;  // why there are no times
  TransferTimes times;
  // Seconds of its memory's ceiling for Report::bytes, just before and just after it; empty if it cannot be measured.
  std::vector<double> ceiling{};
};

struct DeathResult {
  Victim victim = Victim::kSource;
  Status status;
  std::vector<double> seconds;  // until the other side has its error
};

struct CrowdResult {
  Crowd crowd;
  Status status;
  CrowdTimes times;
};

struct Report {
  Machine machine;
  std::vector<int> cpus;  // on which everything ran
  int64_t bytes = 0;      // of a large case
  int repeat = 0;
  // Seconds for `bytes`, before and after each case; empty if it cannot be measured, or no case has such memory.
  std::vector<double> streaming_copy;
  std::vector<double> process_vm_readv;
  std::vector<CaseResult> cases;
  std::vector<CrowdResult> crowds;
  std::vector<DeathResult> deaths;

  // The first failure; ok if there is none.
  Status status() const;
};

std::string to_table(const Report& report);
std::string to_json(const Report& report);  // one line

}  // namespace tessera::bench
