// How errors show the contents of a file.
#pragma once

#include <string>
#include <string_view>

#include "base/escape.h"

namespace tessera::checkpoint {

// A name or another text in quotes: always on one line, and truncated to 120 bytes.
inline std::string shown(std::string_view text) {
  constexpr size_t kMost = 120;
  return in_quotes(text.substr(0, kMost)) + (text.size() > kMost ? "..." : "");
}

}  // namespace tessera::checkpoint
