#include "tools/etp/logs.h"

#include "base/fail.h"
#include "device/record/log_file.h"

namespace tessera::tools {

std::vector<device::RankLog> read_logs(std::span<const std::string> paths) {
  std::vector<device::RankLog> logs;
  for (const std::string& path : paths) {
    try {
      logs.push_back(device::read_log(path));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kDataLoss) throw;
      throw Error(ErrorCode::kInvalidArgument, error.what());
    }
  }
  return logs;
}

}  // namespace tessera::tools
