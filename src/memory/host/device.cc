#include "memory/device.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "base/fail.h"
#include "base/fd.h"
#include "memory/host/memory_limit.h"

namespace tessera::host {

Capability capability() {
  const UniqueFd probe(::memfd_create("tessera-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!probe) return {.available = false, .detail = fmt::format("memfd_create: {}", std::strerror(errno))};
  if (::fcntl(probe.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE) != 0)
    return {.available = false,
            .detail = fmt::format("memfd seals: {}; shared memory needs Linux 5.1 or newer", std::strerror(errno))};
  const MemoryLimits limits = read_memory_limits();
  return {.available = true,
          .detail = fmt::format("memfd with seals; {} MiB available{}", limits.available >> 20,
                                limits.group_left
                                    ? fmt::format(", {} MiB left in the control group", *limits.group_left >> 20)
                                    : std::string())};
}

}  // namespace tessera::host
