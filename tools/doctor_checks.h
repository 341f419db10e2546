// What `tessera doctor` looks at.
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
  std::string detail;  // what is there
  std::string fix;     // unless kGood, and where there is one
};
std::string_view to_string(Check::State state);  // "good", "limited", "missing"

// Which way private memory is read, by what each costs: "process_vm_readv (...) for pieces of 4.10 kB and more, the
// bounce ring (...) for smaller ones".
std::string private_memory_text(const PathCost& readv, const PathCost& ring);

// Looks and changes nothing. Never throws for what it finds.
std::vector<Check> examine_machine();

// The same of only the runtime folder `root`: whether it can be used, and one check for each thing that a process
// which has died left there.
std::vector<Check> examine_runtime_folder(const std::string& root);
// Removes what those processes left. Throws Error.
void clean_runtime_folder(const std::string& root);

}  // namespace tessera::tools
