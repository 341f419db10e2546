#include "tools/observe.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/config.h"
#include "tools/option_checks.h"

namespace tessera::tools {

void ObserveOptions::declare(CLI::App& command) {
  trace = Config::get().trace;
  command.add_option("--metrics", metrics, "Serve metrics for Prometheus at [HOST]:PORT; without HOST at 127.0.0.1")
      ->check(not_empty());
  command.add_option("--trace", trace, "Write a trace for Perfetto to this file (default: TESSERA_TRACE)");
}

Observation ObserveOptions::start() const {
  Observation observation;
  if (!metrics.empty()) {
    observation.metrics = std::make_unique<MetricsServer>(parse_metrics_address(metrics));
    fmt::print(stderr, "metrics at {}\n", observation.metrics->url());
  }
  if (!trace.empty()) observation.trace = Trace::start(trace);
  return observation;
}

}  // namespace tessera::tools
