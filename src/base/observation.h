// What a process shows of its work: metrics over HTTP and a trace, as options or the environment request.
//
// There is one in each process, shared by all that need it. A command's options take precedence over TESSERA_METRICS
// and TESSERA_TRACE.
#pragma once

#include <memory>
#include <string>

#include "base/metrics_server.h"
#include "base/trace.h"

namespace tessera {

class Observation {
 public:
  // Returns the process's instance, or makes one. Throws Error if `metrics` (an address) or `trace` (a file) cannot be
  // used. If it is the environment that asks for them, a warning is logged instead: a library without metrics still
  // works; but a text that is no address is an error, which names the variable. In a file's name %p stands for the
  // process id. Thread-safe.
  static std::shared_ptr<Observation> start(const std::string& metrics = {}, const std::string& trace = {});

  std::string metrics_url() const { return metrics_ ? metrics_->url() : std::string(); }

 private:
  Observation() = default;
  void serve(const HostPort& address);
  void write(std::string file);

  std::unique_ptr<MetricsServer> metrics_;
  std::unique_ptr<Trace> trace_;
};

}  // namespace tessera
