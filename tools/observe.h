// Options of commands that run for a while: `--metrics ADDR` and `--trace FILE`.
#pragma once

#include <memory>
#include <string>

#include "base/observation.h"

namespace CLI {
class App;
}

namespace tessera::tools {

struct ObserveOptions {
  std::string metrics;
  std::string trace;
  bool lasting = false;  // whether the command has declared them

  void declare(CLI::App& command);
  // Prints where the metrics are to stderr. Null for other commands. Throws Error for an address or file that cannot be
  // used.
  std::shared_ptr<Observation> start() const;
};

}  // namespace tessera::tools
