// Schedule logs, as recorders write them: seeds, and what the tests of the command check.
#pragma once

#include <string>
#include <vector>

namespace tessera::fuzz {

struct ScheduleSeed {
  std::string name;
  std::string input;  // of the target `schedule`
};

std::vector<ScheduleSeed> schedule_seeds();

}  // namespace tessera::fuzz
