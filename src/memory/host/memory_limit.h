// The amount of memory that this process may still take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

struct MemoryLimits {
  uint64_t available = 0;              // MemAvailable of /proc/meminfo
  std::optional<uint64_t> group_left;  // what the tightest control group's limit leaves, its page cache counted as
                                       // free; a limit that the machine's memory cannot reach is none
  std::string group_limit_file;        // the file that names that limit
};

// Reads under `root` ("" for the machine itself; tests pass a tree they made).
MemoryLimits read_memory_limits(const std::string& root = {});

// Throws Error(kResourceExhausted), which begins with `what` and gives all figures, if `bytes` more would not fit.
void require_memory(uint64_t bytes, std::string_view what, const MemoryLimits& limits = read_memory_limits());

}  // namespace tessera
