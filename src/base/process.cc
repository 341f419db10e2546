#include "base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "base/control_groups.h"
#include "base/fail.h"
#include "base/mutex.h"
#include "base/socket.h"

namespace tessera {
namespace {

// Fields 3 and 22 of /proc/PID/stat; zero if the process has ended.
struct Stat {
  char state = 0;
  uint64_t start_time = 0;
  bool is_stopped() const { return state == 'T' || state == 't'; }
};

// The command name (field 2) may hold spaces and parentheses, so counting starts behind its last ')'.
Stat stat_of(int32_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return {};
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream fields(line.substr(end + 1));
  Stat stat;
  fields >> stat.state;
  std::string field;
  for (int number = 4; number <= 22; ++number) fields >> field;
  stat.start_time = std::strtoull(field.c_str(), nullptr, 10);
  return fields ? stat : Stat{};
}

uint64_t start_time_of(int32_t pid) {
  return stat_of(pid).start_time;
}

uint64_t pid_namespace() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Without a free descriptor nothing can be read, but it exists: treating it as empty would mistake every peer for
// another.
void require_descriptor() {
  if (!UniqueFd(::open("/proc/self/stat", O_RDONLY | O_CLOEXEC)) && (errno == EMFILE || errno == ENFILE))
    fail_errno("open /proc/self/stat");
}

bool has_our_pids(const Incarnation& other) {
  const Incarnation self = Incarnation::self();
  return self.same_host(other) && self.pid_namespace == other.pid_namespace;
}

uint64_t draw_nonce() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

// 0 without torchrun, or if it sets something that is not a number.
uint32_t restart_count() {
  const char* const text = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (text == nullptr) return 0;
  uint32_t count = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, count);
  return error == std::errc() && stop == end ? count : 0;
}

}  // namespace

Incarnation Incarnation::next() {
  Incarnation next = self();
  next.nonce = draw_nonce();
  return next;
}

Incarnation Incarnation::self() {
  static Mutex mutex;
  static Incarnation self GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  if (self.pid != ::getpid()) {
    const Incarnation found{.boot_id = tessera::boot_id(),
                            .pid_namespace = tessera::pid_namespace(),
                            .pid = ::getpid(),
                            .start_time = start_time_of(::getpid()),
                            .nonce = draw_nonce(),
                            .restart = restart_count()};
    if (found.boot_id.empty() || found.start_time == 0) require_descriptor();
    self = found;
  }
  return self;
}

std::string Incarnation::to_string() const {
  const std::string restarts = restart == 0 ? "" : ", restart " + std::to_string(restart);
  return fmt::format("pid {} (started {}{})", pid, start_time, restarts);
}

UniqueFd open_pidfd(const Incarnation& incarnation) {
  if (!has_our_pids(incarnation)) return {};
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, incarnation.pid, 0)));
  // The pid may have been reused before the call: the start time tells.
  if (fd && start_time_of(incarnation.pid) != incarnation.start_time) return {};
  return fd;
}

bool await_end(const Incarnation& incarnation, const Deadline& deadline) {
  const UniqueFd pidfd = open_pidfd(incarnation);
  return pidfd ? wait_ready(pidfd.get(), POLLIN, deadline) : liveness_of(incarnation) == Liveness::kDead;
}

// Reports death only on proof: pidfd_open() may be refused, descriptors may have run out, /proc may hide other
// processes.
Liveness liveness_of(const Incarnation& incarnation) {
  if (!has_our_pids(incarnation)) return Liveness::kUnknowable;
  if (::kill(incarnation.pid, 0) != 0 && errno == ESRCH) return Liveness::kDead;
  const uint64_t start_time = start_time_of(incarnation.pid);
  if (start_time != 0 && start_time != incarnation.start_time) return Liveness::kDead;  // the pid has been reused
  const UniqueFd fd = open_pidfd(incarnation);
  if (!fd) return Liveness::kUnknowable;
  pollfd poll_fd{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, 0) == 0 ? Liveness::kAlive : Liveness::kDead;  // a zombie is readable: dead
}

bool is_stopped(const Incarnation& incarnation) {
  if (!has_our_pids(incarnation)) return false;
  const Stat stat = stat_of(incarnation.pid);
  return stat.start_time == incarnation.start_time && stat.is_stopped();
}

bool is_stopped(pid_t pid) {
  return pid > 0 && stat_of(pid).is_stopped();
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const auto mask = static_cast<uint64_t>(::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1);
  return static_cast<int>(std::max<uint64_t>(std::min(mask, group_cpus().value_or(mask)), 1));
}

}  // namespace tessera
