#include "device/host/memory_limit.h"

#include <algorithm>
#include <charconv>
#include <fstream>

#include "base/fail.h"

namespace tessera {
namespace {

// The number behind `key` ("" for a file that holds just a number); none where the file or key is missing or says
// "max".
std::optional<uint64_t> read_number(const std::string& path, std::string_view key = {}) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!key.empty()) {
      if (word != key) continue;
      if (!(file >> word)) return {};
    }
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{}) return {};
    return value;
  }
  return {};
}

// The two generations of control groups name the same things differently.
struct GroupFiles {
  std::string_view mount, limit, usage, inactive_file, active_file;
};
constexpr GroupFiles kV2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};
constexpr GroupFiles kV1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                         "total_inactive_file", "total_active_file"};

struct Machine {
  std::string root;
  uint64_t memory = 0;  // MemTotal, bytes
};

// The first generation writes "unlimited" as a number of its own, beyond any memory.
void lower_to_group(MemoryLimits& limits, const Machine& machine, const std::string& folder, const GroupFiles& names) {
  const std::string limit_file = fmt::format("{}/{}", folder, names.limit);
  const auto limit = read_number(limit_file);
  const auto usage = read_number(fmt::format("{}/{}", folder, names.usage));
  if (!limit || !usage || *limit >= machine.memory) return;
  const std::string stat = fmt::format("{}/memory.stat", folder);
  const uint64_t cache =
      read_number(stat, names.inactive_file).value_or(0) + read_number(stat, names.active_file).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  const uint64_t left = *limit - std::min(*limit, used);
  if (limits.group_left && *limits.group_left <= left) return;
  limits.group_left = left;
  limits.group_limit_file = limit_file;
}

// This process' group and all above it. In a container the path may count from outside: then only the mount's own root
// is there to be read, which is the container's group.
void read_groups(MemoryLimits& limits, const Machine& machine, std::string path, const GroupFiles& names) {
  const std::string mount = machine.root + std::string(names.mount);
  while (path.size() > 1) {
    lower_to_group(limits, machine, mount + path, names);
    path.resize(path.find_last_of('/'));
  }
  lower_to_group(limits, machine, mount, names);
}

}  // namespace

MemoryLimits read_memory_limits(const std::string& root) {
  MemoryLimits limits;
  const auto meminfo = [&](std::string_view key) {  // KiB there, bytes here
    return read_number(root + "/proc/meminfo", key).value_or(UINT64_MAX >> 10) << 10;
  };
  limits.available = meminfo("MemAvailable:");
  const Machine machine{.root = root, .memory = meminfo("MemTotal:")};
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // "0::/path" or "4:memory:/path"
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) read_groups(limits, machine, line.substr(second + 1), kV2);
    if (controllers == "memory") read_groups(limits, machine, line.substr(second + 1), kV1);
  }
  return limits;
}

void require_memory(uint64_t bytes, std::string_view what, const MemoryLimits& limits) {
  const uint64_t left = std::min(limits.available, limits.group_left.value_or(UINT64_MAX));
  if (bytes <= left) return;
  const std::string group = limits.group_left
                                ? fmt::format(", {} leaves {} bytes", limits.group_limit_file, *limits.group_left)
                                : std::string();
  fail(ErrorCode::kResourceExhausted, "{}: {} bytes wanted; MemAvailable is {} bytes{}", what, bytes, limits.available,
       group);
}

}  // namespace tessera
