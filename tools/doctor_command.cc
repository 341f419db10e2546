#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/launch.h"
#include "base/runtime_dir.h"
#include "tessera/version.h"
#include "tools/commands.h"
#include "tools/doctor_checks.h"

namespace tessera::tools {
namespace {

constexpr char kDoctorExamples[] = R"(Examples:
  tessera doctor
  tessera doctor --json
  tessera doctor --clean)";

// The value in the environment now, or the default.
std::string current_value(const EnvironmentVariable& variable) {
  const char* set = std::getenv(std::string(variable.name).c_str());
  if (set == nullptr || *set == '\0') return std::string(variable.default_value);
  return variable.secret ? "(set)" : set;
}

// Where this process's rank and world size come from.
struct LaunchWords {
  std::string rank, world;
};

LaunchWords launch_words() {
  const auto words = [](const std::optional<Said>& said) {
    return said ? fmt::format("{}, from {} ({})", said->value, said->variable, said->launcher->name) : "not set";
  };
  try {
    const Launch said = launched(::getenv);
    return {.rank = words(said.rank), .world = words(said.world)};
  } catch (const Error& error) {
    return {.rank = error.what(), .world = error.what()};
  }
}

std::string_view mark_of(Check::State state) {
  return state == Check::State::kGood ? "ok" : state == Check::State::kLimited ? "--" : "no";
}

void print_text(const std::vector<Check>& checks) {
  fmt::print("tessera {}\n", kVersion);
  std::string_view section;
  for (const Check& check : checks) {
    if (check.section != section) fmt::print("\n{}\n", check.section);
    section = check.section;
    fmt::print("  {:2}  {:18} {}\n", mark_of(check.state), check.name, check.detail);
    if (!check.fix.empty()) fmt::print("      {:18} -> {}\n", "", check.fix);
  }
  fmt::print("\nenvironment\n");
  for (const EnvironmentVariable& variable : environment_variables())
    fmt::print("  {:22} {:12} {}\n", variable.name, current_value(variable), variable.meaning);
  const LaunchWords launch = launch_words();
  fmt::print("\nlaunch\n  {:22} {}\n  {:22} {}\n", "rank", launch.rank, "world", launch.world);
}

void print_json(const std::vector<Check>& checks) {
  using Json = nlohmann::ordered_json;
  Json json{{"version", kVersion}, {"checks", Json::array()}, {"environment", Json::array()}};
  for (const Check& check : checks)
    json["checks"].push_back({{"section", check.section},
                              {"name", check.name},
                              {"state", to_string(check.state)},
                              {"detail", check.detail},
                              {"fix", check.fix}});
  for (const EnvironmentVariable& variable : environment_variables())
    json["environment"].push_back({{"name", variable.name},
                                   {"value", current_value(variable)},
                                   {"default", variable.default_value},
                                   {"meaning", variable.meaning}});
  const LaunchWords launch = launch_words();
  json["launch"] = {{"rank", launch.rank}, {"world", launch.world}};
  fmt::print("{}\n", json.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void add_doctor_command(CLI::App& app, Run& run) {
  CLI::App& command = *app.add_subcommand("doctor", "Show what this machine can do, what is missing and how to get it")
                           ->footer(kDoctorExamples);
  const auto json = std::make_shared<bool>(false);
  const auto clean = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "Print one JSON object");
  command.add_flag("--clean", *clean, "First remove what dead processes left in the runtime directory");
  command.callback([json, clean, &run] {
    run = [json, clean](Interrupt&) {
      if (*clean) clean_runtime_folder(RuntimeDir::default_root());
      const std::vector<Check> checks = examine_machine();
      *json ? print_json(checks) : print_text(checks);
      return ExitStatus::kOk;
    };
  });
}

}  // namespace tessera::tools
