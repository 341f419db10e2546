// Detects peers that are stopped, by a signal or a debugger. A call that waits for a stopped peer fails and says so;
// one that waits for a slow peer goes on waiting.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fail.h"
#include "base/process.h"

namespace tessera {

inline constexpr Duration kSilence = seconds(0.3);      // how long a peer is silent before its state is checked
inline constexpr Duration kStopPeriod = seconds(0.15);  // between two checks, while something waits

// For one peer's process.
class StopDetector {
 public:
  // kPeerLost if it is stopped and was stopped at the last check, too; else ok. One check is not enough: the processes
  // of a job are continued one after another, and a tracer stops a process briefly at every system call.
  Status look(const std::string& name, const Incarnation& process) {
    return judge(name, process.pid, is_stopped(process));
  }
  // The same for an agent and its worker: if either is stopped, nothing comes from that rank.
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
