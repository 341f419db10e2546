#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/escape.h"
#include "base/fail.h"
#include "device/record/check.h"
#include "tools/etp/commands.h"
#include "tools/etp/logs.h"
#include "tools/option_checks.h"

namespace tessera::tools {
namespace {

using device::CheckReport;
using device::Conflict;
using device::ConflictSide;
using device::RankLog;

constexpr char kEtpCheckExamples[] = R"(Examples:
  tessera etp check run7/*.etplog             # what all ranks wrote with TESSERA_ETP_LOG=run7/{rank}.etplog
  tessera etp check --json --most 10 run7/*.etplog

Exit status: 0 every two accesses to the same bytes are ordered, 1 some are not, 2 the logs cannot be read or do not fit
together.)";

struct EtpCheckArguments {
  std::vector<std::string> logs;
  size_t most = 100;
  bool json = false;
};

nlohmann::ordered_json side_json(const ConflictSide& side) {
  return {{"rank", side.rank},           {"record", side.sequence}, {"actor", side.actor},
          {"operation", side.operation}, {"write", side.write},     {"version", side.version}};
}

nlohmann::ordered_json report_json(const CheckReport& report, size_t torn) {
  nlohmann::ordered_json conflicts = nlohmann::ordered_json::array();
  for (const Conflict& conflict : report.conflicts)
    conflicts.push_back({{"first", side_json(conflict.first)},
                         {"second", side_json(conflict.second)},
                         {"memory", conflict.memory},
                         {"owner", conflict.region.owner},
                         {"region", conflict.region.number},
                         {"begin", conflict.begin},
                         {"end", conflict.end},
                         {"missing", conflict.missing}});
  return {{"records", report.records},     {"accesses", report.accesses}, {"conflicts", std::move(conflicts)},
          {"more", report.more},           {"faults", report.faults},     {"unfinished", report.unfinished},
          {"unreached", report.unreached}, {"torn_bytes", torn}};
}

void print_report(const CheckReport& report, size_t logs) {
  for (const Conflict& conflict : report.conflicts) fmt::print("{}\n\n", conflict.to_string());
  for (const std::string& fault : report.faults) fmt::print("fault: {}\n", fault);
  for (const std::string& line : report.unfinished) fmt::print("{}\n", line);
  if (report.unreached > 0) fmt::print("{} records wait for these, and were not checked\n", report.unreached);
  const std::string conflicts = report.conflicts.empty()       ? "no conflict"
                                : report.conflicts.size() == 1 ? "1 conflict"
                                                               : fmt::format("{} conflicts", report.conflicts.size());
  fmt::print("{} records and {} accesses of {} ranks: {}{}\n", report.records, report.accesses, logs, conflicts,
             report.more ? ", and more: see --most" : "");
}

ExitStatus run_etp_check(const EtpCheckArguments& arguments) {
  const std::vector<RankLog> logs = read_logs(arguments.logs);
  size_t torn = 0;
  for (size_t i = 0; i < logs.size(); ++i) {
    torn += logs[i].torn_bytes();
    if (logs[i].torn_bytes() > 0 && !arguments.json)
      fmt::print("{}: its last {} B were not written whole, and are left out\n", printable(arguments.logs[i]),
                 logs[i].torn_bytes());
  }
  const CheckReport report = device::check_schedule(logs, {.most_conflicts = arguments.most});
  if (arguments.json)
    fmt::print("{}\n", report_json(report, torn).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  else
    print_report(report, logs.size());
  if (!report.conflicts.empty()) return ExitStatus::kVerificationFailed;
  if (!report.faults.empty())
    fail(ErrorCode::kMismatch, "the logs do not fit together: {}"_message, report.faults.front());
  return ExitStatus::kOk;
}

}  // namespace

void add_etp_check_command(CLI::App& etp, Run& run) {
  CLI::App& command =
      *etp.add_subcommand("check", "Find accesses to the same bytes that nothing orders, in the logs of all ranks")
           ->footer(kEtpCheckExamples);
  const auto arguments = std::make_shared<EtpCheckArguments>();
  command.add_option("LOG", arguments->logs, "The logs of all ranks of one run, one file each")
      ->required()
      ->check(not_empty());
  command.add_option("--most", arguments->most, "Stop after so many conflicts (default: 100)")
      ->check(whole_number("a number of conflicts", 1'000'000));
  command.add_flag("--json", arguments->json, "Print one JSON object");
  command.callback([arguments, &run] { run = [arguments](Interrupt&) { return run_etp_check(*arguments); }; });
}

}  // namespace tessera::tools
