// The project's logger: one line an event on standard error, level by TESSERA_LOG (trace, debug, info, warn, error,
// off; default warn). Thread-safe.
#pragma once

#include <spdlog/logger.h>

namespace tessera {

spdlog::logger& log();

}  // namespace tessera
