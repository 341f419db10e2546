#include "base/config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "base/mutex.h"

namespace tessera {
namespace {

constexpr std::array kVariables{
    EnvironmentVariable{"TESSERA_LOG", "warn", "log level: trace, debug, info, warn, error or off"},
    EnvironmentVariable{"TESSERA_LOG_FORMAT", "text", "form of log lines: text, logfmt (key=value) or json"},
    EnvironmentVariable{"TESSERA_METRICS", "",
                        "where a process serves its metrics: PORT or HOST:PORT; port 0 picks a free one, and the log "
                        "shows it at level info; default nowhere"},
    EnvironmentVariable{
        "TESSERA_TRACE", "",
        "file for a trace of this process, for Perfetto; %p in the name stands for the process id; default none", false,
        true},
    EnvironmentVariable{"TESSERA_STORE", "auto", "the store's URL: auto, tcp://HOST:PORT or unix:///PATH"},
    EnvironmentVariable{"TESSERA_TOKEN", "",
                        "token of a tcp:// store, for clients of other users, in containers or on other hosts", true},
    EnvironmentVariable{"TESSERA_TOKEN_FILE", "", "a file that holds the token instead", false, true},
    EnvironmentVariable{
        "TESSERA_AGENT", "embedded",
        "who moves the data of a rank: embedded (its own threads) or daemon (the `tessera agent` of that rank)"},
    EnvironmentVariable{"TESSERA_NAMESPACE", "default", "name of this run among those that share a store"},
    EnvironmentVariable{"TESSERA_RANK", "",
                        "rank of this process in its job, from 0; default RANK (torchrun), OMPI_COMM_WORLD_RANK, "
                        "PMI_RANK, SLURM_PROCID"},
    EnvironmentVariable{
        "TESSERA_WORLD_SIZE", "",
        "number of processes of this job; default WORLD_SIZE (torchrun), OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_NTASKS"},
    EnvironmentVariable{"TORCHELASTIC_RESTART_COUNT", "",
                        "set by torchrun: a job that it restarts takes the place of its earlier self"},
    EnvironmentVariable{"TESSERA_RUNTIME_DIR", "",
                        "folder for sockets and locks; default $XDG_RUNTIME_DIR/tessera, else /tmp/tessera-UID", false,
                        true},
    EnvironmentVariable{
        "XDG_RUNTIME_DIR", "",
        "folder of the login session, set by the system; the default of TESSERA_RUNTIME_DIR lies in it"},
    EnvironmentVariable{"TESSERA_FORCE_KERNEL", "",
                        "codec kernels to use: scalar, or a SIMD target (SSE4, AVX2, AVX3, NEON, ...); default the "
                        "best that the CPU has"},
    EnvironmentVariable{
        "TESSERA_FORCE_PULL", "",
        "how private memory of another process is read: readv or stream; default the cheaper one, as measured"},
    EnvironmentVariable{"TESSERA_FORCE_TRANSPORT", "",
                        "the only transport to use between processes; default the best one for each pair"},
    EnvironmentVariable{"TESSERA_ALLOW_PTRACE", "",
                        "any: where Yama asks for consent, let every process of this user read (and trace) this one "
                        "while a bus is open, so that private memory needs no stream; default no"},
    EnvironmentVariable{"TESSERA_ETP_CHECK", "",
                        "1: sharded weights are checked for writes outside of updates, and released buffers are "
                        "filled with NaN; default 0, no"},
    EnvironmentVariable{
        "TESSERA_ETP_LOG", "",
        "file that the schedule of sharded weights is recorded in, for tessera etp check and trace; {rank} "
        "and {group} in it are replaced; default none",
        false, true},
};

// The value with ~ or a leading ~/ replaced, if there is a home folder.
std::string expand_home(std::string path) {
  const char* const home = std::getenv("HOME");
  if (home == nullptr || *home == '\0' || (path != "~" && !path.starts_with("~/"))) return path;
  return home + path.substr(1);
}

std::string value_of(std::string_view name) {
  for (const EnvironmentVariable& variable : kVariables) {
    if (variable.name != name) continue;
    const char* set = std::getenv(std::string(name).c_str());
    std::string value(set != nullptr && *set != '\0' ? std::string_view(set) : variable.default_value);
    return variable.path ? expand_home(std::move(value)) : value;
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
      .etp_check = value_of("TESSERA_ETP_CHECK"),
      .etp_log = value_of("TESSERA_ETP_LOG"),
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

namespace {

void require_one_of(std::string_view name, const std::string& value, std::initializer_list<std::string_view> values) {
  if (std::ranges::find(values, std::string_view(value)) != values.end()) return;
  std::vector<std::string_view> shown;
  for (const std::string_view choice : values)
    if (!choice.empty()) shown.push_back(choice);
  fail(ErrorCode::kInvalidArgument, "{} is {}, not {}: change or unset it"_message, name, in_quotes(value),
       fmt::join(shown, ", "));
}

void require_path(std::string_view name, const std::string& value) {
  if (value.starts_with('~'))
    fail(ErrorCode::kInvalidArgument,
         "{} is {}: only ~/ stands for a home folder, and only if HOME is set: write it out"_message, name,
         in_quotes(value));
}

}  // namespace

void Config::require_valid() {
  const Config& values = get();
  require_one_of("TESSERA_LOG", values.log_level, {"trace", "debug", "info", "warn", "error", "off"});
  require_one_of("TESSERA_LOG_FORMAT", values.log_format, {"text", "logfmt", "json"});
  require_one_of("TESSERA_FORCE_PULL", values.force_pull, {"", "readv", "stream"});
  require_one_of("TESSERA_ALLOW_PTRACE", values.allow_ptrace, {"", "any"});
  require_one_of("TESSERA_ETP_CHECK", values.etp_check, {"", "0", "1"});
  require_path("TESSERA_RUNTIME_DIR", values.runtime_dir);
  require_path("TESSERA_TRACE", values.trace);
  require_path("TESSERA_TOKEN_FILE", values.token_file);
  require_path("TESSERA_ETP_LOG", values.etp_log);
  const std::string restarts = value_of("TORCHELASTIC_RESTART_COUNT");
  uint32_t count = 0;
  const char* const end = restarts.data() + restarts.size();
  const auto [stop, error] = std::from_chars(restarts.data(), end, count);
  if (!restarts.empty() && (error != std::errc() || stop != end))
    fail(ErrorCode::kInvalidArgument, "TORCHELASTIC_RESTART_COUNT is {}, not a number from 0 up"_message,
         in_quotes(restarts));
}

void Config::forget() {
  const MutexLock lock(config_mutex);
  config.reset();
}

}  // namespace tessera
