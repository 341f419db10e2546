// Options that take several values: `--layout A B`, `--layout A --layout B` and `--layout=A` all work.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tools/option_checks.h"

namespace tessera::tools {

// Declares one, which takes no empty value. (CLI11's own options with several values split a value that begins with '['
// and ends with ']', as a regex may; hence one value for each flag here, and expand_lists() beforehand.)
inline CLI::Option* add_list(CLI::App& app, const std::string& flag, std::vector<std::string>& values,
                             const std::string& help) {
  return app.add_option(flag, values, help)->allow_extra_args(false)->check(not_empty());
}

// Repeats the flag before each further value of the list options (--layout, --skip, --checkpoint, --verify, --src,
// --dst, --format): {"--layout", "A", "B"} becomes {"--layout", "A", "--layout", "B"}.
std::vector<std::string> expand_lists(const std::vector<std::string>& args);

}  // namespace tessera::tools
