// Schedule logs as arguments of commands.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "device/record/rank_log.h"

namespace tessera::tools {

// Reads each. Throws what device::read_log() does, but for kDataLoss, whose exit status is that of a verification that
// failed: a damaged file is kInvalidArgument.
std::vector<device::RankLog> read_logs(std::span<const std::string> paths);

}  // namespace tessera::tools
