#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "tools/commands.h"
#include "tools/completion.h"

namespace tessera::tools {
namespace {

constexpr char kCompletionExamples[] = R"(Examples:
  source <(tessera completion bash)                                     # in ~/.bashrc, or once: in this shell
  source <(tessera completion zsh)                                      # in ~/.zshrc, behind compinit
  tessera completion fish > ~/.config/fish/completions/tessera.fish)";

using Script = std::string (*)(const CLI::App& app);

}  // namespace

void add_completion_command(CLI::App& app, Run& run) {
  CLI::App& command = *app.add_subcommand("completion", "Print the completion of this command line for a shell")
                           ->footer(kCompletionExamples);
  command.require_subcommand(1);
  for (const auto& [shell, script] :
       {std::pair<const char*, Script>("bash", bash_completion), std::pair<const char*, Script>("zsh", zsh_completion),
        std::pair<const char*, Script>("fish", fish_completion)})
    command.add_subcommand(shell, fmt::format("For {}", shell))->callback([&app, &run, print = script] {
      run = [&app, print](Interrupt&) {
        fmt::print("{}", print(app));
        return ExitStatus::kOk;
      };
    });
}

}  // namespace tessera::tools
