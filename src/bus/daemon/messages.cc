#include "bus/daemon/messages.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace tessera::bus {

std::string agent_socket_name(const std::string& name_space, const std::string& job, Rank rank) {
  const std::string who = fmt::format("{}\n{}\n{}", name_space, job, rank);
  return fmt::format("agent-{:016x}", XXH3_64bits(who.data(), who.size()));
}

}  // namespace tessera::bus
