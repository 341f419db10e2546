// Options of commands that run for a while: `--metrics ADDR` and `--trace FILE`.
#pragma once

#include <memory>
#include <string>

#include "base/metrics_server.h"
#include "base/trace.h"

namespace CLI {
class App;
}

namespace tessera::tools {

// What is served and written while it lives.
struct Observation {
  std::unique_ptr<MetricsServer> metrics;
  std::unique_ptr<Trace> trace;
};

struct ObserveOptions {
  std::string metrics;
  std::string trace;

  void declare(CLI::App& command);
  // Says on stderr where the metrics are. Throws Error for an address or file that cannot be used.
  Observation start() const;
};

}  // namespace tessera::tools
