#include "transport/connection.h"

namespace tessera {

std::string_view to_string(Access access) {
  constexpr std::string_view kNames[] = {"map", "get", "stream"};
  return kNames[static_cast<size_t>(access)];
}

Access cheaper_access(const PathCost& get, const PathCost& stream, int64_t bytes, int64_t pieces) {
  constexpr double kClearly = 0.8;
  return stream.seconds(bytes, pieces) < kClearly * get.seconds(bytes, pieces) ? Access::kStream : Access::kGet;
}

}  // namespace tessera
