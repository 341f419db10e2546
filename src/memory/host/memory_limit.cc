#include "memory/host/memory_limit.h"

#include <algorithm>

#include "base/control_groups.h"
#include "base/fail.h"

namespace tessera {
namespace {

// Versions 1 and 2 of control groups use different names for the same things.
struct GroupFiles {
  std::string_view limit, usage, inactive_file, active_file;
};
constexpr GroupFiles kV2{"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr GroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};

// Version 1 writes "unlimited" as a special number, beyond any memory.
void lower_to_group(MemoryLimits& limits, const ControlGroup& group, uint64_t machine_memory) {
  const GroupFiles& names = group.generation == ControlGroup::Generation::kV2 ? kV2 : kV1;
  const std::string limit_file = fmt::format("{}/{}", group.folder, names.limit);
  const auto limit = read_number(limit_file);
  const auto usage = read_number(fmt::format("{}/{}", group.folder, names.usage));
  if (!limit || !usage || *limit >= machine_memory) return;
  const std::string stat = fmt::format("{}/memory.stat", group.folder);
  const uint64_t cache =
      read_number(stat, names.inactive_file).value_or(0) + read_number(stat, names.active_file).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  const uint64_t left = *limit - std::min(*limit, used);
  if (limits.group_left && *limits.group_left <= left) return;
  limits.group_left = left;
  limits.group_limit_file = limit_file;
}

}  // namespace

MemoryLimits read_memory_limits(const std::string& root) {
  MemoryLimits limits;
  const auto meminfo = [&](std::string_view key) {  // KiB there, bytes here
    return read_number(root + "/proc/meminfo", key).value_or(UINT64_MAX >> 10) << 10;
  };
  limits.available = meminfo("MemAvailable:");
  const uint64_t machine_memory = meminfo("MemTotal:");
  for (const ControlGroup& group : control_groups("memory", root)) lower_to_group(limits, group, machine_memory);
  return limits;
}

void require_memory(uint64_t bytes, std::string_view what, const MemoryLimits& limits) {
  const uint64_t left = std::min(limits.available, limits.group_left.value_or(UINT64_MAX));
  if (bytes <= left) return;
  const std::string group = limits.group_left
                                ? fmt::format(", {} leaves {} bytes", limits.group_limit_file, *limits.group_left)
                                : std::string();
  fail(ErrorCode::kResourceExhausted, "{}: {} bytes wanted; MemAvailable is {} bytes{}"_message, what, bytes,
       limits.available, group);
}

}  // namespace tessera
