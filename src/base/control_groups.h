// The control groups that limit this process, of both generations.
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

// The groups of `controller` ("cpu", "memory") that this process is in, innermost first: its own and all above it. In a
// container the path may count from outside: then only the mount's own root is there to be read, which is the
// container's group. Reads under `root` ("" for the machine itself; tests bring a tree of their own).
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = {});

// CPUs that the tightest group grants, rounded up; none where no group limits them.
std::optional<uint64_t> group_cpus(const std::string& root = {});

// The number behind `key` ("" for a file that holds just a number); none where the file or the key is missing, or says
// "max" or -1.
std::optional<uint64_t> read_number(const std::string& path, std::string_view key = {});

}  // namespace tessera
