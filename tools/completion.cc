#include "tools/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>
#include <vector>

namespace tessera::tools {
namespace {

struct Option {
  std::vector<std::string> names{};  // "--rank", "-h"
  bool takes_value = false;
  std::string help{};
};

struct Command {
  std::string name{};
  std::string help{};
  std::vector<Option> options{};
  std::vector<Command> below{};  // candidates for its first argument

  std::vector<std::string> option_names() const {
    std::vector<std::string> all;
    for (const Option& option : options) all.insert(all.end(), option.names.begin(), option.names.end());
    return all;
  }
  // Options of the commands below, each once.
  std::vector<Option> options_below() const {
    std::vector<Option> all;
    for (const Command& command : below)
      for (const Option& option : command.options)
        if (std::ranges::find(all, option.names, &Option::names) == all.end() &&
            std::ranges::find(options, option.names, &Option::names) == options.end())
          all.push_back(option);
    return all;
  }
};

std::vector<Option> options_of(const CLI::App& app) {
  std::vector<Option> options;
  for (const CLI::Option* declared : app.get_options()) {
    Option option{.takes_value = declared->get_items_expected_max() > 0, .help = declared->get_description()};
    for (const std::string& name : declared->get_lnames()) option.names.push_back("--" + name);
    for (const std::string& name : declared->get_snames()) option.names.push_back("-" + name);
    if (!option.names.empty()) options.push_back(std::move(option));
  }
  return options;
}

std::vector<Command> commands_of(const CLI::App& app) {
  std::vector<Command> commands;
  for (const CLI::App* declared : app.get_subcommands({})) {
    Command& command = commands.emplace_back();
    command.name = declared->get_name();
    command.help = declared->get_description();
    command.options = options_of(*declared);
    command.below = commands_of(*declared);
  }
  return commands;
}

std::vector<std::string> names_of(const std::vector<Command>& commands) {
  std::vector<std::string> names;
  for (const Command& command : commands) names.push_back(command.name);
  return names;
}

// In single quotes, for a shell.
std::string quoted_for_shell(std::string_view text, std::string_view quote = "'\\''") {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'')
      out += quote;
    else
      out += c == '\n' ? ' ' : c;
  }
  return out + "'";
}

// For an option of zsh's _arguments, where brackets and colons would end the text.
std::string described_for_zsh(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string without_dashes(std::string_view name) {
  return std::string(name.substr(name.find_first_not_of('-')));
}

}  // namespace

std::string bash_completion(const CLI::App& app) {
  const std::vector<Command> commands = commands_of(app);
  std::string cases, cases_below, valued;
  for (const Command& command : commands) {
    std::vector<std::string> words = names_of(command.below);
    const std::vector<std::string> own = command.option_names();
    words.insert(words.begin(), own.begin(), own.end());
    cases += fmt::format("    {}) words='{}' ;;\n", command.name, fmt::join(words, " "));
    for (const Command& below : command.below)
      cases_below +=
          fmt::format("    {}/{}) words='{}' ;;\n", command.name, below.name, fmt::join(below.option_names(), " "));
    for (const std::vector<Option>& options : {command.options, command.options_below()})
      for (const Option& option : options)
        if (option.takes_value)
          valued += fmt::format("|{}/{}", command.name, fmt::join(option.names, "|" + command.name + "/"));
  }
  return fmt::format(R"(# bash completion of `tessera`: source <(tessera completion bash)
_tessera() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '{} {}' -- "$word"))
    return
  fi
  case $command/$before in
    {})
      COMPREPLY=($(compgen -f -- "$word"))
      return
      ;;
  esac
  case $command in
{}  esac
  ((COMP_CWORD == 2)) || case $command/${{COMP_WORDS[2]}} in
{}  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _tessera tessera
)",
                     fmt::join(names_of(commands), " "),
                     fmt::join(Command{.options = options_of(app)}.option_names(), " "),
                     valued.empty() ? "''" : valued.substr(1), cases, cases_below);
}

std::string zsh_completion(const CLI::App& app) {
  const std::vector<Command> commands = commands_of(app);
  std::string listed, cases;
  for (const Command& command : commands) {
    listed += fmt::format("    {}\n", quoted_for_shell(described_for_zsh(command.name) + ":" + command.help));
    cases += fmt::format("    {})\n      _arguments", command.name);
    for (const std::vector<Option>& options : {command.options, command.options_below()})
      for (const Option& option : options)
        for (const std::string& name : option.names)
          cases += fmt::format(" \\\n        {}",
                               quoted_for_shell(fmt::format("*{}[{}]{}", name, described_for_zsh(option.help),
                                                            option.takes_value ? ":value:_files" : "")));
    if (!command.below.empty())
      cases += fmt::format(" \\\n        '1:argument:({})'", fmt::join(names_of(command.below), " "));
    cases += "\n      ;;\n";
  }
  return fmt::format(R"(#compdef tessera
# zsh completion of `tessera`: source <(tessera completion zsh)
_tessera() {{
  local -a commands
  commands=(
{}  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  ((CURRENT--))
  case $command in
{}  esac
}}
compdef _tessera tessera
)",
                     listed, cases);
}

std::string fish_completion(const CLI::App& app) {
  const std::vector<Command> commands = commands_of(app);
  std::string out = "# fish completion of `tessera`: tessera completion fish | source\n";
  const auto quoted = [](std::string_view text) { return quoted_for_shell(text, "\\'"); };
  for (const Command& command : commands)
    out += fmt::format("complete -c tessera -f -n __fish_use_subcommand -a {} -d {}\n", command.name,
                       quoted(command.help));
  const auto add_options = [&](const std::string& seen, const Command& command) {
    for (const Option& option : command.options) {
      out += seen;
      for (const std::string& name : option.names)
        out += fmt::format(" -{} {}", name.starts_with("--") ? "l" : "s", without_dashes(name));
      out += fmt::format("{} -d {}\n", option.takes_value ? " -r" : "", quoted(option.help));
    }
  };
  for (const Command& command : commands) {
    // A command's name may also be that of one below another: `tessera plan`, `tessera etp plan`.
    std::string condition = "__fish_seen_subcommand_from " + command.name;
    for (const Command& other : commands)
      if (std::ranges::find(other.below, command.name, &Command::name) != other.below.end())
        condition += "; and not __fish_seen_subcommand_from " + other.name;
    const std::string seen = fmt::format("complete -c tessera -n '{}'", condition);
    add_options(seen, command);
    if (command.below.empty()) continue;
    out += fmt::format("{} -f -a '{}'\n", seen, fmt::join(names_of(command.below), " "));
    for (const Command& below : command.below)
      add_options(fmt::format("complete -c tessera -n '{}; and __fish_seen_subcommand_from {}'", condition, below.name),
                  below);
  }
  return out;
}

}  // namespace tessera::tools
