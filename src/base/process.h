// Identifies a process, so that a peer can tell it from another with the same pid, and notice its death.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "base/message.h"

namespace tessera {

// One life of one process: (boot id, pid namespace, pid, start time, random). A value.
struct Incarnation {
  std::string boot_id;         // /proc/sys/kernel/random/boot_id
  uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid
  int32_t pid = 0;             // in that namespace
  uint64_t start_time = 0;     // clock ticks since boot, /proc/PID/stat field 22
  uint64_t nonce = 0;          // random, drawn once in each process
  uint32_t restart = 0;        // restarts of the job by torchrun so far: TORCHELASTIC_RESTART_COUNT

  // This process. The nonce is drawn at the first call, and again in a forked child.
  static Incarnation self();
  // This process with a new nonce: for one of several incarnations in a process, in sequence or side by side.
  static Incarnation next();

  bool same_process(const Incarnation& other) const {
    return same_host(other) && pid_namespace == other.pid_namespace && pid == other.pid &&
           start_time == other.start_time;
  }
  bool same_host(const Incarnation& other) const { return boot_id == other.boot_id; }
  // Whether `other` is the same rank after torchrun restarted the job: torchrun ends all processes before it starts
  // others.
  bool is_superseded_by(const Incarnation& other) const { return restart < other.restart; }
  std::string to_string() const;  // "pid 4711 (started 123456)", "pid 4711 (started 123456, restart 2)"
  static void fields(auto& f, auto& self) {
    f("boot_id", self.boot_id, 64);
    f("pid_namespace", self.pid_namespace);
    f("pid", self.pid);
    f("start_time", self.start_time);
    f("nonce", self.nonce);
    f("restart", self.restart);
    f.require(self.pid > 0, "incarnation: pid {}"_message, self.pid);
  }
  bool operator==(const Incarnation&) const = default;
};

// kUnknowable: on another host, in another pid namespace, or this process may not look. Then only a lease tells.
enum class Liveness { kAlive, kDead, kUnknowable };

Liveness liveness_of(const Incarnation& incarnation);

// Whether a signal or a debugger has stopped it. False if that cannot be seen from here.
bool is_stopped(const Incarnation& incarnation);
// The same for whatever process has that pid in this process's pid namespace.
bool is_stopped(pid_t pid);

// A pidfd of exactly that incarnation; readable once it has died. Empty if it is dead already or cannot be seen from
// here: liveness_of() tells which.
UniqueFd open_pidfd(const Incarnation& incarnation);

// Waits until it has ended. False at the deadline, and immediately if it cannot be seen from here.
bool await_end(const Incarnation& incarnation, const Deadline& deadline);

// CPUs this process may use: the affinity mask, bounded by its control groups; at least 1.
int usable_cpus();

}  // namespace tessera
