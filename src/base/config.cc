#include "base/config.h"

#include <array>
#include <cstdlib>
#include <optional>

#include "base/mutex.h"

namespace tessera {
namespace {

constexpr std::array kVariables{
    EnvironmentVariable{"TESSERA_LOG", "warn", "log level: trace, debug, info, warn, error or off"},
    EnvironmentVariable{"TESSERA_LOG_FORMAT", "text", "form of log lines: text, logfmt (key=value) or json"},
    EnvironmentVariable{"TESSERA_METRICS", "",
                        "where a process on the bus serves its metrics: PORT or HOST:PORT, 0 for a free port, which "
                        "the log tells at level info; default nowhere"},
    EnvironmentVariable{"TESSERA_TRACE", "",
                        "file for a trace of what a process on the bus does, for Perfetto; %p in it is the process' "
                        "id; default none"},
    EnvironmentVariable{"TESSERA_STORE", "auto", "the store's URL: auto, tcp://HOST:PORT or etcd://HOST:PORT"},
    EnvironmentVariable{"TESSERA_TOKEN", "",
                        "the secret of a tcp:// store, for its clients as other users, in containers or on other hosts",
                        true},
    EnvironmentVariable{"TESSERA_TOKEN_FILE", "", "a file that holds it instead"},
    EnvironmentVariable{"TESSERA_AGENT", "embedded",
                        "who moves a rank's data: embedded, or daemon: the `tessera agent` of that rank"},
    EnvironmentVariable{"TESSERA_NAMESPACE", "default", "tells runs apart that share one store"},
    EnvironmentVariable{"TESSERA_RANK", "",
                        "this process in its job, from 0; default RANK (torchrun), OMPI_COMM_WORLD_RANK, PMI_RANK, "
                        "SLURM_PROCID"},
    EnvironmentVariable{"TESSERA_WORLD_SIZE", "",
                        "processes of this job; default WORLD_SIZE (torchrun), OMPI_COMM_WORLD_SIZE, PMI_SIZE, "
                        "SLURM_NTASKS"},
    EnvironmentVariable{"TORCHELASTIC_RESTART_COUNT", "",
                        "as torchrun sets it: a job that it has started again takes the place of its earlier self"},
    EnvironmentVariable{"TESSERA_RUNTIME_DIR", "",
                        "folder for sockets and locks; default $XDG_RUNTIME_DIR/tessera, else /tmp/tessera-UID"},
    EnvironmentVariable{"XDG_RUNTIME_DIR", "",
                        "the session's own folder, as the system sets it: the default of TESSERA_RUNTIME_DIR is in it"},
    EnvironmentVariable{"TESSERA_FORCE_KERNEL", "",
                        "codec kernels to use: scalar, or a SIMD target's name (SSE4, AVX2, AVX3, NEON, ...)"},
    EnvironmentVariable{"TESSERA_FORCE_PULL", "",
                        "how private memory of another process is read: readv or stream; default by measured cost"},
    EnvironmentVariable{"TESSERA_FORCE_TRANSPORT", "",
                        "the only transport to use between processes; default the best for each pair"},
    EnvironmentVariable{"TESSERA_ALLOW_PTRACE", "",
                        "any: where Yama asks for consent, lets every process of this user read (and trace) this one "
                        "while a bus is open, so that private memory needs no stream; default no"},
};

std::string value_of(std::string_view name) {
  for (const EnvironmentVariable& variable : kVariables) {
    if (variable.name != name) continue;
    const char* set = std::getenv(std::string(name).c_str());
    return set != nullptr && *set != '\0' ? std::string(set) : std::string(variable.default_value);
  }
  return {};
}

}  // namespace

std::span<const EnvironmentVariable> environment_variables() {
  return kVariables;
}

namespace {

Config read_environment() {
  return {
      .log_level = value_of("TESSERA_LOG"),
      .log_format = value_of("TESSERA_LOG_FORMAT"),
      .metrics = value_of("TESSERA_METRICS"),
      .trace = value_of("TESSERA_TRACE"),
      .store = value_of("TESSERA_STORE"),
      .agent = value_of("TESSERA_AGENT"),
      .token = value_of("TESSERA_TOKEN"),
      .token_file = value_of("TESSERA_TOKEN_FILE"),
      .name_space = value_of("TESSERA_NAMESPACE"),
      .runtime_dir = value_of("TESSERA_RUNTIME_DIR"),
      .xdg_runtime_dir = value_of("XDG_RUNTIME_DIR"),
      .force_kernel = value_of("TESSERA_FORCE_KERNEL"),
      .force_pull = value_of("TESSERA_FORCE_PULL"),
      .force_transport = value_of("TESSERA_FORCE_TRANSPORT"),
      .allow_ptrace = value_of("TESSERA_ALLOW_PTRACE"),
  };
}

Mutex config_mutex;
std::optional<const Config> config GUARDED_BY(config_mutex);

}  // namespace

const Config& Config::get() {
  const MutexLock lock(config_mutex);
  if (!config) config.emplace(read_environment());
  return *config;
}

void Config::forget() {
  const MutexLock lock(config_mutex);
  config.reset();
}

}  // namespace tessera
