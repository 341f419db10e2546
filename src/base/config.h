// Every environment variable that Tessera reads, in one table. Those of launchers are in base/launch.h.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tessera {

struct EnvironmentVariable {
  std::string_view name;
  std::string_view default_value;
  std::string_view meaning;
  bool secret = false;  // never print its value
  bool path = false;    // a leading ~/ stands for the home folder, as in a shell
};

// The table behind Config, for `tessera doctor` and the documentation.
std::span<const EnvironmentVariable> environment_variables();

// The values from the environment, read once at the first call of get(). Immutable, hence thread-safe.
struct Config {
  std::string log_level;        // TESSERA_LOG
  std::string log_format;       // TESSERA_LOG_FORMAT
  std::string metrics;          // TESSERA_METRICS
  std::string trace;            // TESSERA_TRACE
  std::string store;            // TESSERA_STORE
  std::string agent;            // TESSERA_AGENT
  std::string token;            // TESSERA_TOKEN
  std::string token_file;       // TESSERA_TOKEN_FILE
  std::string name_space;       // TESSERA_NAMESPACE
  std::string runtime_dir;      // TESSERA_RUNTIME_DIR
  std::string xdg_runtime_dir;  // XDG_RUNTIME_DIR
  std::string force_kernel;     // TESSERA_FORCE_KERNEL
  std::string force_pull;       // TESSERA_FORCE_PULL
  std::string force_transport;  // TESSERA_FORCE_TRANSPORT
  std::string allow_ptrace;     // TESSERA_ALLOW_PTRACE
  std::string etp_check;        // TESSERA_ETP_CHECK
  std::string etp_log;          // TESSERA_ETP_LOG

  static const Config& get();
  // Throws Error(kInvalidArgument), which names variable and value, if one has a value that is none of its kind. Those
  // that an option replaces (TESSERA_STORE, ...) and those of launchers are checked where they are used. Thread-safe.
  static void require_valid();
  // For tests: the next get() reads the environment again. REQUIRES: no result of get() is in use
  static void forget();
};

}  // namespace tessera
