#include <CLI/CLI.hpp>

#include "tools/etp/commands.h"

namespace tessera::tools {

void add_etp_command(CLI::App& app, Run& run) {
  CLI::App& etp = *app.add_subcommand("etp", "Extended tensor parallelism: what it would do, and what it did");
  etp.require_subcommand(1);
  etp.footer("");  // not that of all commands
  add_etp_check_command(etp, run);
  add_etp_plan_command(etp, run);
  add_etp_trace_command(etp, run);
}

}  // namespace tessera::tools
