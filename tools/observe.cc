#include "tools/observe.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "tools/option_checks.h"

namespace tessera::tools {

void ObserveOptions::declare(CLI::App& command) {
  command.add_option("--metrics", metrics, "Serve metrics for Prometheus at [HOST]:PORT (default: TESSERA_METRICS)")
      ->check(not_empty());
  command
      .add_option("--trace", trace,
                  "Write a trace for Perfetto to this file; %p in its name is the pid (default: TESSERA_TRACE)")
      ->check(not_empty());
  command.preparse_callback([this](size_t) { lasting = true; });
}

std::shared_ptr<Observation> ObserveOptions::start() const {
  if (!lasting) return nullptr;
  std::shared_ptr<Observation> observation = Observation::start(metrics, trace);
  if (const std::string url = observation->metrics_url(); !url.empty()) fmt::print(stderr, "metrics at {}\n", url);
  return observation;
}

}  // namespace tessera::tools
