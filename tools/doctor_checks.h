// The checks of `tessera doctor`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/connection.h"

namespace tessera::tools {

struct Check {
  enum class State { kGood, kLimited, kMissing };
  std::string section;  // "machine", "memory", "processes", "transports"
  std::string name;
  State state = State::kGood;
  std::string detail;  // what was found
  std::string fix;     // unless kGood, and if there is one
};
std::string_view to_string(Check::State state);  // "good", "limited", "missing"

// How private memory is read, given the cost of each way: "process_vm_readv (...) for pieces of 4.10 kB and more, the
// bounce ring (...) for smaller ones".
std::string private_memory_text(const PathCost& readv, const PathCost& ring);

// Changes nothing. Never throws for what it finds.
std::vector<Check> examine_machine();

// Checks only the runtime folder `root`: whether it can be used, and one check for each thing that a dead process has
// left there.
std::vector<Check> examine_runtime_folder(const std::string& root);
// Removes what dead processes have left. Throws Error.
void clean_runtime_folder(const std::string& root);

}  // namespace tessera::tools
