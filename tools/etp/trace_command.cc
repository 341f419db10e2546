#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "device/record/timeline.h"
#include "tools/etp/commands.h"
#include "tools/etp/logs.h"
#include "tools/option_checks.h"

namespace tessera::tools {
namespace {

constexpr char kEtpTraceExamples[] = R"(Examples:
  tessera etp trace run7/*.etplog -o run7.json     # then open run7.json at https://ui.perfetto.dev)";

struct EtpTraceArguments {
  std::vector<std::string> logs;
  std::string out;
};

ExitStatus run_etp_trace(const EtpTraceArguments& arguments) {
  const std::vector<device::RankLog> logs = read_logs(arguments.logs);
  std::ostringstream json;  // whole, so that a file is not replaced by an error
  const device::TimelineFigures figures = device::write_timeline(logs, json);
  errno = 0;
  std::ofstream file(arguments.out, std::ios::binary | std::ios::trunc);
  file << json.view();
  file.close();
  if (!file) fail_errno("cannot write " + arguments.out);
  fmt::print("{}: {} operations on {} streams of {} ranks; open it at https://ui.perfetto.dev\n",
             printable(arguments.out), figures.operations, figures.streams, logs.size());
  return ExitStatus::kOk;
}

}  // namespace

void add_etp_trace_command(CLI::App& etp, Run& run) {
  CLI::App& command =
      *etp.add_subcommand("trace", "Draw when the operations in logs ran, for Perfetto: a line a stream")
           ->footer(kEtpTraceExamples);
  const auto arguments = std::make_shared<EtpTraceArguments>();
  command.add_option("LOG", arguments->logs, "The logs of some or all ranks of one run")
      ->required()
      ->check(not_empty());
  command.add_option("-o,--out", arguments->out, "The file to write")->required()->check(not_empty());
  command.callback([arguments, &run] { run = [arguments](Interrupt&) { return run_etp_trace(*arguments); }; });
}

}  // namespace tessera::tools
