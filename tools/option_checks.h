// Checks of option values, beyond those of CLI11, for CLI::Option::check().
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::tools {

// Returns in one line what is wrong with a value; empty if it is right.
using OptionCheck = std::function<std::string(const std::string&)>;

// A decimal number from `least` to `most`; `what` names it: "a version".
OptionCheck whole_number(std::string what, int64_t most, int64_t least = 1);

// A number of seconds from `least` to `most`; nan and inf are refused.
OptionCheck seconds_between(double least, double most);

// Refuses "": an unset variable in a script must not choose the default.
OptionCheck not_empty();

}  // namespace tessera::tools
