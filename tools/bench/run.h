// Runs the cases that were selected for `tessera bench`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tools/bench/report.h"

namespace tessera::bench {

struct RunOptions {
  int64_t bytes = int64_t{1} << 30;  // of a large case
  int repeat = 5;
  std::string only;    // selects cases in whose names this RE2 is found; empty: all
  bool quick = false;  // the short selection
};

// Called before each step.
using OnStep = std::function<void(int step, int steps, const std::string& name)>;

// Throws kInvalidArgument if nothing is selected. Failures of cases are in the report. REQUIRES: the calling process
// has one thread.
Report run(const RunOptions& options, const OnStep& on_step);

}  // namespace tessera::bench
