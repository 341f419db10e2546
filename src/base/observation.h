// What a process shows of itself while it works: metrics over HTTP and a trace, as options or the environment ask.
//
// One a process, shared by all that need it: a command's options come first, then TESSERA_METRICS and TESSERA_TRACE.
#pragma once

#include <memory>
#include <string>

#include "base/metrics_server.h"
#include "base/trace.h"

namespace tessera {

class Observation {
 public:
  // The process' own: the one that lives, or a new one. Throws Error where `metrics` (an address) or `trace` (a file)
  // cannot be used. What the environment asks for, and cannot be, is a warning in the log: a library that cannot show
  // figures still works. In a file's name %p stands for the process' id. Thread-safe.
  static std::shared_ptr<Observation> start(const std::string& metrics = {}, const std::string& trace = {});

  std::string metrics_url() const { return metrics_ ? metrics_->url() : std::string(); }

 private:
  Observation() = default;
  void serve(const std::string& address);
  void write(std::string file);

  std::unique_ptr<MetricsServer> metrics_;
  std::unique_ptr<Trace> trace_;
};

}  // namespace tessera
