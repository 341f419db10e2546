#include <fmt/format.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "tessera/store.h"
#include "tools/commands.h"
#include "tools/interrupt.h"
#include "tools/option_checks.h"

namespace tessera::tools {
namespace {

// Raises the limit of descriptors as far as this process may: every client takes one.
void take_all_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

constexpr char kStoreExamples[] = R"(Examples:
  tessera store --listen 127.0.0.1:7070
  TESSERA_TOKEN_FILE=secret tessera store --listen 0.0.0.0:7070 --data /var/lib/tessera
  tessera send --store tcp://127.0.0.1:7070 ...

On one machine no store is needed: with --store auto, the default, the first command hosts it.
SIGTERM ends the store with exit status 0, Ctrl-C with 130.)";

}  // namespace

void add_store_command(CLI::App& app, Run& run) {
  CLI::App& command =
      *app.add_subcommand("store", "Run the store where jobs meet, until a signal ends it")->footer(kStoreExamples);
  const auto listen = std::make_shared<std::string>("127.0.0.1:7070");
  const auto data = std::make_shared<std::string>();
  const auto json = std::make_shared<bool>(false);
  command.add_option("--listen", *listen, "HOST:PORT; port 0 picks a free one")->capture_default_str();
  command.add_option("--data", *data, "Folder that keeps the state over a restart")->check(not_empty());
  command.add_flag("--json", *json, "Print {\"address\":\"...\"} when ready");
  command.callback([listen, data, json, &run] {
    run = [listen, data, json](Interrupt& interrupt) {
      take_all_descriptors();
      const std::unique_ptr<StoreServer> server = serve_store(*listen, {.data_dir = *data});
      if (*json) {
        fmt::print("{{\"address\":\"{}\"}}\n", server->address());
      } else {
        fmt::print("{}\n", server->address());
      }
      return exit_status_of_service(interrupt.wait());
    };
  });
}

}  // namespace tessera::tools
