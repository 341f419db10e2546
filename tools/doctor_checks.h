// What `tessera doctor` looks at.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "exec/pull_cost.h"

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

// Which way private memory is read: "process_vm_readv (...) for pieces of 4.10 kB and more, the bounce ring (...) for
// smaller ones".
std::string private_memory_text(const PullCosts& costs);

// Looks; changes nothing but that the runtime directory is made if it is not there. Never throws for what it finds.
std::vector<Check> examine_machine();

}  // namespace tessera::tools
