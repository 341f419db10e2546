// The commands of `tessera`. Each has a separate file that defines add_<name>_command(): it declares the subcommand and
// its options, and its parser callback sets `run` to the command's code.
#pragma once

#include <functional>

#include "tools/exit_status.h"

namespace CLI {
class App;
}

namespace tessera::tools {

class Interrupt;

// The code of a command, called once its arguments are parsed. Throws tessera::Error; main() prints it and chooses the
// status.
using Run = std::function<ExitStatus(Interrupt&)>;

void add_store_command(CLI::App& app, Run& run);
void add_agent_command(CLI::App& app, Run& run);
void add_send_command(CLI::App& app, Run& run);
void add_recv_command(CLI::App& app, Run& run);
void add_top_command(CLI::App& app, Run& run);
void add_plan_command(CLI::App& app, Run& run);
void add_etp_command(CLI::App& app, Run& run);
void add_bench_command(CLI::App& app, Run& run);
void add_doctor_command(CLI::App& app, Run& run);
void add_completion_command(CLI::App& app, Run& run);  // for all that `app` has once it is parsed

}  // namespace tessera::tools
