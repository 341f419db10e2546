// Peers that are stopped, by a signal or a debugger: a call that waits for one says so, while one that is merely slow
// is waited for.
#pragma once

#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fail.h"
#include "base/process.h"

namespace tessera::bus {

inline constexpr Duration kSilence = seconds(0.3);      // of a peer, before its state is looked at
inline constexpr Duration kStopPeriod = seconds(0.15);  // from one look to the next, while something waits

// What is known of one peer's process.
class StopDetector {
 public:
  // kPeerLost if it is stopped, and was so at the last look; else ok. A job is continued one process after the other,
  // and a tracer stops a process for a moment at every system call: one look would not do.
  Status look(const std::string& name, const Incarnation& process) {
    if (!std::exchange(stopped_, is_stopped(process)) || !stopped_) return {};
    return failed(ErrorCode::kPeerLost, "{} (pid {}) is stopped: continue it (kill -CONT {}) or end it", name,
                  process.pid, process.pid);
  }

 private:
  bool stopped_ = false;
};

}  // namespace tessera::bus
