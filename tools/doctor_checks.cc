#include "tools/doctor_checks.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>

#include "base/config.h"
#include "base/fail.h"
#include "base/process.h"
#include "base/runtime_dir.h"
#include "codec/simd/kernel.h"
#include "memory/device.h"
#include "memory/host/memory_limit.h"
#include "store/auto_host.h"
#include "tools/progress_bar.h"
#include "transport/transport.h"

namespace tessera::tools {
namespace {

using State = Check::State;

constexpr rlim_t kEnoughDescriptors = 1024;

// The first line of a small file; empty if it cannot be read.
std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The choice in brackets of a file such as "always [madvise] never".
std::string chosen_in(const std::string& path) {
  const std::string line = line_of(path);
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? "unknown" : line.substr(open + 1, close - open - 1);
}

Check cpus() {
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const int usable = usable_cpus();
  Check check{"machine", "CPUs", State::kGood, fmt::format("{} of {} usable", usable, online), ""};
  if (usable < online) {
    check.state = State::kLimited;
    check.fix = "the affinity mask or the control group's cpu.max leaves fewer: widen it to copy with more threads";
  }
  return check;
}

Check kernels() {
  try {
    const auto active = active_kernel();
    const bool scalar = active == "scalar";
    return {"machine", "SIMD kernels", scalar ? State::kLimited : State::kGood,
            fmt::format("{} (of {})", active, fmt::join(available_kernels(), ", ")),
            scalar ? "unset TESSERA_FORCE_KERNEL; without it the best target of the CPU is used" : ""};
  } catch (const Error& error) {
    return {"machine", "SIMD kernels", State::kMissing, error.what(), "unset TESSERA_FORCE_KERNEL"};
  }
}

Check environment() {
  try {
    Config::require_valid();
    require_forced_transport();
    return {"machine", "environment", State::kGood, "no variable has a value that is none of its kind", ""};
  } catch (const Error& error) {
    return {"machine", "environment", State::kMissing, error.what(), "change or unset it"};
  }
}

Check available_memory() {
  const MemoryLimits limits = read_memory_limits();
  Check check{"memory", "available", State::kGood,
              fmt::format("{} of the machine", format_bytes(static_cast<int64_t>(limits.available))), ""};
  if (limits.group_left && *limits.group_left < limits.available) {
    check.state = State::kLimited;
    check.detail += fmt::format(", {} of the control group", format_bytes(static_cast<int64_t>(*limits.group_left)));
    check.fix = "the limit is in " + limits.group_limit_file;
  }
  return check;
}

Check shared_memory() {
  const Capability host = device_capability(DeviceKind::kHost);
  return {"memory", "shared memory", host.available ? State::kGood : State::kMissing, host.detail,
          host.available ? "" : "a sandbox may forbid memfd_create: allow it"};
}

Check huge_pages() {
  const std::string folder = "/sys/kernel/mm/transparent_hugepage/";
  const std::string shared = chosen_in(folder + "shmem_enabled");
  const bool good = shared == "advise" || shared == "always" || shared == "within_size" || shared == "force";
  return {"memory", "huge pages", good ? State::kGood : State::kLimited,
          fmt::format("shared memory: {}, private memory: {}", shared, chosen_in(folder + "enabled")),
          good ? "" : "echo advise > " + folder + "shmem_enabled (as root) avoids page faults in large tensors"};
}

Check descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const bool good = limit.rlim_cur >= kEnoughDescriptors;
  return {"processes", "file descriptors", good ? State::kGood : State::kLimited,
          fmt::format("limit {}", static_cast<uint64_t>(limit.rlim_cur)),
          good ? "" : fmt::format("ulimit -n {}: every peer takes a few", static_cast<uint64_t>(kEnoughDescriptors))};
}

Check death_notice() {
  const bool good = static_cast<bool>(open_pidfd(Incarnation::self()));
  return {"processes", "pidfd", good ? State::kGood : State::kLimited,
          good ? "a peer's death is noticed at once" : "missing: a peer's death is noticed when its socket closes",
          good ? "" : "needs Linux 5.3 and a visible /proc"};
}

// The smallest piece, a power of two, for which process_vm_readv is the cheaper way, if there is one.
std::optional<int64_t> readv_from_bytes(const PathCost& readv, const PathCost& ring) {
  constexpr int64_t kPieces = 1024;
  for (int64_t piece = 64; piece <= int64_t{1} << 30; piece *= 2)
    if (cheaper_access(readv, ring, piece * kPieces, kPieces) == Access::kGet) return piece;
  return std::nullopt;
}

std::string describe(const PathCost& cost) {
  return fmt::format("{:.1f} GB/s, {:.0f} ns a piece", cost.byte > 0 ? 1e-9 / cost.byte : 0.0, cost.piece * 1e9);
}

// Whether Yama's scope prevents processes of one user from reading one another; in scope 1 they may if the process that
// is read consents.
bool yama_forbids(std::string_view scope) {
  if (scope.empty() || scope == "0" || ::geteuid() == 0) return false;
  return scope != "1" || Config::get().allow_ptrace != "any";
}

// Connects to this process as if it were another one of this host.
std::unique_ptr<Connection> reach_self() {
  const Endpoint self{.process = Incarnation::self(), .name = "this process"};
  for (const Transport* transport : TransportRegistry::builtin().transports())
    if (transport->name() == "shm") return transport->connect(self);
  fail_internal("no transport between processes of this host");
}

Check private_memory() try {
  Check check{"processes", "private memory", State::kGood, "", ""};
  const std::string yama = line_of("/proc/sys/kernel/yama/ptrace_scope");
  const std::unique_ptr<Connection> peer = reach_self();
  if (!peer->caps().has(Access::kGet)) {
    check.state = State::kLimited;
    check.detail = fmt::format("bounce ring only: {}", peer->get_refused().message());
    check.fix = "a sandbox may forbid process_vm_readv: allow it, or hold tensors in Tessera's shared memory";
  } else if (yama_forbids(yama)) {
    check.state = State::kLimited;
    check.detail = fmt::format("bounce ring between unrelated processes: Yama's ptrace_scope is {}", yama);
    check.fix = fmt::format("{}sysctl kernel.yama.ptrace_scope=0, or hold tensors in Tessera's shared memory",
                            yama == "1" ? "TESSERA_ALLOW_PTRACE=any in a process lets every process of the user read "
                                          "its memory by process_vm_readv; or "
                                        : "");
  } else {
    check.detail = private_memory_text(peer->cost(Access::kGet), peer->cost(Access::kStream));
  }
  const std::string& forced = Config::get().force_pull;
  if (!forced.empty()) check.detail += fmt::format("; TESSERA_FORCE_PULL={}", forced);
  if (const std::string& allowed = Config::get().allow_ptrace; !allowed.empty())
    check.detail += fmt::format("; TESSERA_ALLOW_PTRACE={}", allowed);
  return check;
} catch (const Error& error) {  // without kernels nothing can be measured
  return {"processes", "private memory", State::kMissing, error.what(), ""};
}

// "pid 4711, trainer/3, since 2026-05-01 12:00:00 UTC: python train.py"
std::string describe(const ProcessFolder& folder) {
  std::string text = folder.pid > 0 ? fmt::format("pid {}", folder.pid) : "a process that has not said who it is";
  if (!folder.role.empty()) text += ", " + folder.role;
  if (folder.since > 0) text += fmt::format(", since {:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(std::time_t{folder.since}));
  if (!folder.command.empty()) text += ": " + folder.command;
  return text;
}

void add_transports(std::vector<Check>& checks) {
  for (const Transport* transport : TransportRegistry::builtin().transports()) {
    const Capability capability = transport->capability();
    checks.push_back({"transports", std::string(transport->name()),
                      capability.available ? State::kGood : State::kMissing, capability.detail, ""});
  }
  const Capability cuda = device_capability(DeviceKind::kCuda);
  checks.push_back({"transports", "cuda memory", cuda.available ? State::kGood : State::kMissing, cuda.detail, ""});
}

}  // namespace

std::string_view to_string(Check::State state) {
  switch (state) {
    case State::kGood:
      return "good";
    case State::kLimited:
      return "limited";
    case State::kMissing:
      return "missing";
  }
  return "unknown";
}

std::string private_memory_text(const PathCost& readv, const PathCost& ring) {
  const std::string by_readv = fmt::format("process_vm_readv ({})", describe(readv));
  const std::string by_ring = fmt::format("the bounce ring ({})", describe(ring));
  if (const auto bytes = readv_from_bytes(readv, ring))
    return fmt::format("{} for pieces of {} and more, {} for smaller ones", by_readv, format_bytes(*bytes), by_ring);
  return fmt::format("{} for all sizes, not {}", by_ring, by_readv);
}

std::vector<Check> examine_runtime_folder(const std::string& root) {
  std::vector<Check> checks{{"processes", "runtime directory", State::kGood, root, ""}};
  const std::string fix = "removed when the next process joins a bus here, or now by `tessera doctor --clean`";
  try {
    size_t living = 0;
    for (const ProcessFolder& folder : RuntimeDir::folders(root)) {
      living += folder.living ? 1 : 0;
      if (!folder.living)
        checks.push_back({"processes", "left over", State::kLimited,
                          fmt::format("{} of {}", folder.path.substr(folder.path.rfind('/') + 1), describe(folder)),
                          fix});
    }
    checks[0].detail += fmt::format(", used by {} process{}", living, living == 1 ? "" : "es");
    if (const auto names = store::AutoHost::left_over(root); !names.empty())
      checks.push_back({"processes", "left over", State::kLimited,
                        fmt::format("{} of a host of the store auto that was killed", fmt::join(names, ", ")), fix});
  } catch (const Error& error) {
    checks = {{"processes", "runtime directory", State::kMissing, error.what(),
               "set TESSERA_RUNTIME_DIR to a folder of your own, mode 0700, with a short name"}};
  }
  return checks;
}

void clean_runtime_folder(const std::string& root) {
  store::AutoHost::tidy(RuntimeDir::prepare_root(root), 0);
}

std::vector<Check> examine_machine() {
  std::vector<Check> checks{cpus(),       environment(), kernels(),      available_memory(), shared_memory(),
                            huge_pages(), descriptors(), death_notice(), private_memory()};
  std::ranges::move(examine_runtime_folder(RuntimeDir::default_root()), std::back_inserter(checks));
  add_transports(checks);
  return checks;
}

}  // namespace tessera::tools
