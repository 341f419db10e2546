// The `tessera` command. Every error is one line on stderr: `tessera: <message>`.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "base/nearest.h"
#include "tessera/version.h"
#include "tools/commands.h"
#include "tools/exit_status.h"
#include "tools/interrupt.h"
#include "tools/list_option.h"
#include "tools/observe.h"

namespace tessera::tools {
namespace {

constexpr char kDescription[] = "Moves the tensors of one running job into another, from any layout to any other.";
constexpr char kExamples[] = R"(Examples:
  tessera store --listen 127.0.0.1:7070
  tessera send --job trainer --peer inference --rank 0 --world 1 --checkpoint model.safetensors --layout '.*=1:R'
  tessera recv --job inference --peer trainer --rank 0 --world 1 --layout '.*=1:R' --out received/
  tessera top
  tessera plan --shape 4096x4096 --dtype bf16 --src 'fsdp=4@0-3:S0' --dst 'tp=2@4-5:S1'
  tessera etp plan --model model.safetensors --group 8
  tessera doctor

)";

void declare(CLI::App& app, Run& run, ObserveOptions& observe) {
  app.set_version_flag("--version", fmt::format("tessera {}", kVersion));
  app.require_subcommand(1);
  app.footer(kExamples + std::string(exit_status_help()));
  add_store_command(app, run);
  add_agent_command(app, run);
  add_send_command(app, run);
  add_recv_command(app, run);
  add_top_command(app, run);
  add_plan_command(app, run);
  add_etp_command(app, run);
  add_bench_command(app, run);
  add_doctor_command(app, run);
  add_completion_command(app, run);
  for (const char* lasting : {"store", "agent", "send", "recv"}) observe.declare(*app.get_subcommand(lasting));
}

ExitStatus complain(std::string message, ExitStatus status) {
  std::ranges::replace(message, '\n', ' ');
  fmt::print(stderr, "tessera: {}\n", printable(message));  // it may repeat what a peer sent
  return status;
}

ExitStatus execute(const Run& run, const ObserveOptions& observe, Interrupt& interrupt) {
  try {
    const std::shared_ptr<Observation> observation = observe.start();
    return run(interrupt);
  } catch (...) {
    const Status status = status_of_current_exception();
    const ExitStatus exit_status = exit_status_of(status.code(), interrupt.requested());
    return complain(exit_status == ExitStatus::kInterrupted ? "interrupted" : status.message(), exit_status);
  }
}

// Throws if the first word is not a command; the parser would report a missing command instead.
void check_command(const CLI::App& app, const std::vector<std::string>& args) {
  const auto word = std::ranges::find_if(args, [](const std::string& arg) { return !arg.starts_with('-'); });
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (word == args.end() || std::ranges::find(names, *word) != names.end()) return;
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw CLI::ParseError(fmt::format("unknown command '{}': there are {}{}"_message, *word, fmt::join(names, ", "),
                                    did_you_mean(*word, known)),
                        CLI::ExitCodes::ExtrasError);
}

// The command that was given, which may be one below another, and its name: "etp plan ".
std::pair<const CLI::App*, std::string> given_command(const CLI::App& app) {
  const CLI::App* command = &app;
  std::string name;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    name += command->get_name() + " ";
  }
  return {command, name};
}

// The message for a command line that cannot be parsed. Unknown options come first, since they may be the reason why
// something else is missing.
std::string complaint_of(const CLI::App& app, const CLI::ParseError& error) {
  std::vector<std::string> options;
  for (const CLI::Option* option : given_command(app).first->get_options())
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  const std::vector<std::string_view> known(options.begin(), options.end());
  for (const std::string& extra : app.remaining(true)) {
    if (!extra.starts_with("--")) continue;
    const std::string meant = extra + did_you_mean(extra.substr(0, extra.find('=')), known);
    return fmt::format("The following argument was not expected: {}"_message, meant);
  }
  return error.what();
}

ExitStatus tessera_main(const std::vector<std::string>& args) {
  CLI::App app(kDescription, "tessera");
  Run run;
  ObserveOptions observe;
  declare(app, run, observe);
  try {
    check_command(app, args);
    std::vector<std::string> reversed = expand_lists(args);
    std::ranges::reverse(reversed);  // as CLI11 takes them
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {  // --help, --version
      app.exit(error);
      return ExitStatus::kOk;
    }
    return complain(
        fmt::format("{}; see tessera {}--help"_message, complaint_of(app, error), given_command(app).second),
        ExitStatus::kBadInput);
  }
  Interrupt interrupt;
  return execute(run, observe, interrupt);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  try {
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);             // a file that grows too large then fails with an error of the call
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // lines reach a log file without delay
    return static_cast<int>(tessera::tools::tessera_main({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera: {}\n", error.what());
    return static_cast<int>(tessera::tools::ExitStatus::kBadInput);
  }
}
