#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

#include <memory>

#include "base/config.h"

namespace tessera {

spdlog::logger& log() {
  // Leaked on purpose: a thread may log while the process tears its statics down.
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger("tessera", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%e %P/%t %n %l: %v");
    made->set_level(spdlog::level::from_str(Config::get().log_level));
    return made;
  }();
  return *logger;
}

}  // namespace tessera
