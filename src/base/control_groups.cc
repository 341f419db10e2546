#include "base/control_groups.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "base/fail.h"

namespace tessera {
namespace {

// Whether `list` ("cpu,cpuacct") names `controller`.
bool names(std::string list, std::string_view controller) {
  std::istringstream items(std::move(list));
  std::string item;
  while (std::getline(items, item, ','))
    if (item == controller) return true;
  return false;
}

// CPUs that one group allows.
std::optional<uint64_t> cpus_of(const ControlGroup& group) {
  uint64_t quota = 0;  // microseconds of CPU in every `period`; 0 without a limit
  uint64_t period = 0;
  if (group.generation == ControlGroup::Generation::kV2) {
    std::ifstream(group.folder + "/cpu.max") >> quota >> period;  // or "max PERIOD"
  } else {
    quota = read_number(group.folder + "/cpu.cfs_quota_us").value_or(0);  // or -1
    period = read_number(group.folder + "/cpu.cfs_period_us").value_or(0);
  }
  if (quota == 0 || period == 0) return {};
  return quota / period + (quota % period != 0 ? 1 : 0);
}

}  // namespace

std::optional<uint64_t> read_number(const std::string& path, std::string_view key) {
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

std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;  // "0::/path" or "4:cpu,cpuacct:/path"
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && !names(controllers, controller)) continue;
    const auto generation = v2 ? ControlGroup::Generation::kV2 : ControlGroup::Generation::kV1;
    const std::string mount = v2 ? root + "/sys/fs/cgroup" : fmt::format("{}/sys/fs/cgroup/{}", root, controller);
    for (std::string path = line.substr(second + 1); path.size() > 1; path.resize(path.find_last_of('/')))
      groups.push_back({generation, mount + path});
    groups.push_back({generation, mount});
  }
  return groups;
}

std::optional<uint64_t> group_cpus(const std::string& root) {
  std::optional<uint64_t> fewest;
  for (const ControlGroup& group : control_groups("cpu", root))
    if (const auto cpus = cpus_of(group)) fewest = std::min(*cpus, fewest.value_or(*cpus));
  return fewest;
}

}  // namespace tessera
