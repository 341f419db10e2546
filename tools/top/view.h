// Formats a look for `tessera top`.
#pragma once

#include <string>
#include <string_view>

#include "tools/top/look.h"

namespace tessera::tools {

std::string_view to_string(TopRank::State state);

// Lines for people. Rates are differences from `before`; there are none without it.
std::string top_text(const TopLook& now, const TopLook* before);

// One JSON object on one line, likewise.
std::string top_json(const TopLook& now, const TopLook* before);

}  // namespace tessera::tools
