// Compares names that users type, ignoring case.
#pragma once

#include <algorithm>
#include <string_view>

namespace tessera::codec {

constexpr bool same_name(std::string_view a, std::string_view b) {
  constexpr auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

}  // namespace tessera::codec
