// Peers that are stopped, by a signal or a debugger: a call that waits for one says so, while one that is merely slow
// is waited for.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fail.h"
#include "base/process.h"

namespace tessera {

inline constexpr Duration kSilence = seconds(0.3);      // of a peer, before its state is looked at
inline constexpr Duration kStopPeriod = seconds(0.15);  // from one look to the next, while something waits

// What is known of one peer's process.
class StopDetector {
 public:
  // kPeerLost if it is stopped, and was so at the last look; else ok. A job is continued one process after the other,
  // and a tracer stops a process for a moment at every system call: one look would not do.
  Status look(const std::string& name, const Incarnation& process) {
    return judge(name, process.pid, is_stopped(process));
  }
  // Likewise of an agent and the worker whose agent it is: without either nothing comes from that rank.
  Status look(const std::string& name, const Incarnation& agent, const std::optional<Incarnation>& worker) {
    return worker && is_stopped(*worker) ? judge("the worker of " + name, worker->pid, true) : look(name, agent);
  }
  Status look(const std::string& name, pid_t pid) { return judge(name, pid, is_stopped(pid)); }

 private:
  Status judge(const std::string& name, pid_t pid, bool stopped) {
    if (!std::exchange(stopped_, stopped) || !stopped) return {};
    return failed(ErrorCode::kPeerLost, "{} (pid {}) is stopped: continue it (kill -CONT {}) or end it"_message, name,
                  pid, pid);
  }

  bool stopped_ = false;
};

}  // namespace tessera
