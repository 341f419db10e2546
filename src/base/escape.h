// Text from elsewhere, made harmless for where it goes: a peer's name may hold a terminal's escape sequences, line
// breaks, or bytes that are no UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// On one line and without effect on a terminal: control characters (C0, DEL, C1), those that turn the direction of text
// around, and bytes that are no UTF-8 become \x1b, \u202e, \xff; the rest, \ included, stays.
std::string printable(std::string_view text);

// Appends a JSON string (RFC 8259), quotes included; valid for any input. What printable() escapes is a \u escape here;
// bytes that are no UTF-8 become U+FFFD.
void append_json_string(std::string_view text, std::string& out);

}  // namespace tessera
