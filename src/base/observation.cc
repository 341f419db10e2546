#include "base/observation.h"

#include <unistd.h>

#include "base/config.h"
#include "base/escape.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/mutex.h"
#include "tessera/error.h"

namespace tessera {
namespace {

struct Present {
  Mutex mutex;
  std::weak_ptr<Observation> observation GUARDED_BY(mutex);
  pid_t owner GUARDED_BY(mutex) = 0;  // a forked child has the object, but none of its threads
};

Present& present() {
  static auto* const present = new Present;  // leaked on purpose: a bus may outlive other statics
  return *present;
}

}  // namespace

std::shared_ptr<Observation> Observation::start(const std::string& metrics, const std::string& trace) {
  Present& now = present();
  const MutexLock lock(now.mutex);
  if (now.owner == ::getpid())
    if (std::shared_ptr<Observation> observation = now.observation.lock()) return observation;
  Config::require_valid();
  const Config& config = Config::get();
  const std::shared_ptr<Observation> made(new Observation);
  HostPort asked;  // by the environment
  if (metrics.empty() && !config.metrics.empty()) {
    try {
      asked = parse_metrics_address(config.metrics);
    } catch (const Error& error) {
      fail(ErrorCode::kInvalidArgument, "TESSERA_METRICS is {}: {}"_message, in_quotes(config.metrics), error.what());
    }
  }
  const auto try_to = [](const char* variable, const auto& task) {
    try {
      task();
    } catch (const Error& error) {
      log_event(LogLevel::warn, "observation.failed", {{"variable", variable}}, "{}: {}", variable, error.what());
    }
  };
  if (!metrics.empty())
    made->serve(parse_metrics_address(metrics));
  else if (!config.metrics.empty())
    try_to("TESSERA_METRICS", [&] { made->serve(asked); });
  if (!trace.empty())
    made->write(trace);
  else if (!config.trace.empty())
    try_to("TESSERA_TRACE", [&] { made->write(config.trace); });
  now.observation = made;
  now.owner = ::getpid();
  return made;
}

void Observation::serve(const HostPort& address) {
  metrics_ = std::make_unique<MetricsServer>(address);
  const std::string url = metrics_->url();
  log_event(LogLevel::info, "metrics.served", {{"url", url}});
  if (metrics_->on_all_interfaces())
    log_event(
        LogLevel::warn, "metrics.exposed", {{"url", url}},
        "{}: metrics are served on all interfaces of this host, to everyone who can reach it: give one of its addresses instead, such as 127.0.0.1:PORT"_message,
        url);
}

void Observation::write(std::string file) {
  if (const size_t at = file.find("%p"); at != std::string::npos) file.replace(at, 2, std::to_string(::getpid()));
  trace_ = Trace::start(file);
}

}  // namespace tessera
