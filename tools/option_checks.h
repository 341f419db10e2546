// What the values of options are checked for, beyond what CLI11 checks. Each is for CLI::Option::check().
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera::tools {

// Says in one line what is wrong with a value; says nothing if it is right.
using OptionCheck = std::function<std::string(const std::string&)>;

// A decimal number from `least` to `most`; `what` names it: "a version".
OptionCheck whole_number(std::string what, int64_t most, int64_t least = 1);

// A number of seconds from `least` to `most`; neither nan nor inf is one.
OptionCheck seconds_between(double least, double most);

// Not "": a variable of a script that is not set is no choice of the default.
OptionCheck not_empty();

}  // namespace tessera::tools
