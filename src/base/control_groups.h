// The control groups that limit this process, version 1 and version 2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct ControlGroup {
  enum class Generation : uint8_t { kV1, kV2 };
  Generation generation = Generation::kV2;
  std::string folder;
};

// The groups of `controller` ("cpu", "memory") that this process is in, innermost first: its own group and all above
// it. In a container the path may be relative to the host's root. Then only the mount's own root can be read, which is
// the container's group. Reads under `root` ("" for the machine itself; tests pass a tree they made).
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = {});

// CPUs that the tightest group allows, rounded up; none if no group limits them.
std::optional<uint64_t> group_cpus(const std::string& root = {});

// The number after `key` ("" for a file that holds only a number); none if the file or the key is missing, or the value
// is "max" or -1.
std::optional<uint64_t> read_number(const std::string& path, std::string_view key = {});

}  // namespace tessera
