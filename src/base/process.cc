#include "base/process.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>

namespace tessera {
namespace {

// Field 22 of /proc/PID/stat, 0 if the process is gone. The command name (field 2) may hold spaces and parentheses, so
// counting starts behind its last ')'.
uint64_t start_time_of(int32_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return 0;
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(line.substr(end + 1));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;
  return fields ? std::strtoull(field.c_str(), nullptr, 10) : 0;
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

}  // namespace

Incarnation Incarnation::self() {
  static Incarnation self;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (self.pid != ::getpid()) {
    std::random_device random;
    self = {.boot_id = tessera::boot_id(),
            .pid_namespace = tessera::pid_namespace(),
            .pid = ::getpid(),
            .start_time = start_time_of(::getpid()),
            .nonce = (uint64_t{random()} << 32) | random()};
  }
  return self;
}

std::string Incarnation::to_string() const {
  return fmt::format("pid {} (started {})", pid, start_time);
}

void Incarnation::write(ByteWriter& out) const {
  out.put_string(boot_id);
  out.put(pid_namespace);
  out.put(pid);
  out.put(start_time);
  out.put(nonce);
}

Incarnation Incarnation::read(ByteReader& in) {
  Incarnation read;
  read.boot_id = in.get_string(64);
  read.pid_namespace = in.get<uint64_t>();
  read.pid = in.get<int32_t>();
  read.start_time = in.get<uint64_t>();
  read.nonce = in.get<uint64_t>();
  if (read.pid <= 0) fail(ErrorCode::kInvalidArgument, "incarnation: pid {}", read.pid);
  return read;
}

UniqueFd open_pidfd(const Incarnation& incarnation) {
  const Incarnation self = Incarnation::self();
  if (!self.same_host(incarnation) || self.pid_namespace != incarnation.pid_namespace) return {};
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, incarnation.pid, 0)));
  // The pid may have been given to another process before the call: the start time tells.
  if (fd && start_time_of(incarnation.pid) != incarnation.start_time) return {};
  return fd;
}

Liveness liveness_of(const Incarnation& incarnation) {
  const Incarnation self = Incarnation::self();
  if (!self.same_host(incarnation)) return Liveness::kUnknowable;
  if (self.pid_namespace != incarnation.pid_namespace) return Liveness::kUnknowable;
  const UniqueFd fd = open_pidfd(incarnation);
  if (!fd) return errno == EMFILE || errno == ENFILE ? Liveness::kUnknowable : Liveness::kDead;
  pollfd poll_fd{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_fd, 1, 0) == 0 ? Liveness::kAlive : Liveness::kDead;  // a zombie is readable: dead
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cpus = ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0)
    cpus = std::min(cpus, static_cast<int>(std::ceil(std::strtod(quota.c_str(), nullptr) / period)));
  return std::max(cpus, 1);
}

}  // namespace tessera
