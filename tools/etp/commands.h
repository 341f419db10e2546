// The commands below `tessera etp`. Each has a file of its own that defines add_etp_<name>_command(), as in
// tools/commands.h.
#pragma once

#include "tools/commands.h"

namespace tessera::tools {

void add_etp_check_command(CLI::App& etp, Run& run);
void add_etp_plan_command(CLI::App& etp, Run& run);
void add_etp_trace_command(CLI::App& etp, Run& run);

}  // namespace tessera::tools
