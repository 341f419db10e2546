#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "base/config.h"
#include "bus/daemon/daemon.h"
#include "bus/registration/records.h"
#include "tools/commands.h"
#include "tools/interrupt.h"
#include "tools/option_checks.h"

namespace tessera::tools {
namespace {

constexpr int64_t kMaxRank = kMaxWorld - 1;

constexpr char kAgentExamples[] = R"(Examples:
  tessera agent --job trainer --rank 0
  TESSERA_AGENT=daemon tessera send --checkpoint model.safetensors --job trainer --rank 0 --peer inference ...

Run one agent for each rank, before or after the worker, on the same machine and with the same TESSERA_RUNTIME_DIR. It
outlives the worker: it finishes the sends that the worker posted from shared memory, then waits for the next worker.
The worker tells it where the store is.)";

}  // namespace

void add_agent_command(CLI::App& app, Run& run) {
  CLI::App& command = *app.add_subcommand("agent", "Run the agent of one rank as a daemon, until a signal ends it")
                           ->footer(kAgentExamples);
  const auto options = std::make_shared<bus::DaemonOptions>();
  const auto json = std::make_shared<bool>(false);
  options->name_space = Config::get().name_space;
  command.add_option("--job", options->job, "Name of the worker's job")->required()->check(not_empty());
  command.add_option("--rank", options->rank, "Rank of the worker in its job")
      ->required()
      ->check(whole_number("a rank", kMaxRank, 0));
  command.add_option("--namespace", options->name_space, "Namespace of the run")->capture_default_str();
  command.add_flag("--json", *json, "Print {\"address\":\"...\"} when ready");
  command.callback([options, json, &run] {
    run = [options, json](Interrupt& interrupt) {
      Config::require_valid();
      const bus::Daemon daemon(*options);
      if (*json)
        fmt::print("{}\n", nlohmann::json{{"address", daemon.address()}}.dump());
      else
        fmt::print("{}\n", daemon.address());
      std::fflush(stdout);
      return exit_status_of_service(interrupt.wait());
    };
  });
}

}  // namespace tessera::tools
