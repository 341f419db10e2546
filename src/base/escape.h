// Makes text from elsewhere harmless to print: a peer's name may hold a terminal's escape sequences, line breaks or
// invalid UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// One line without effect on a terminal: control characters (C0, DEL, C1), characters that change the direction of
// text, and bytes that are not UTF-8 become \x1b, \u202e, \xff. Everything else stays, \ included.
std::string printable(std::string_view text);

// The same in quotes, with ", \ and line breaks escaped as in C++; valid for any input, where fmt's {:?} aborts on
// bytes that are not UTF-8.
std::string in_quotes(std::string_view text);

// Appends a JSON string (RFC 8259) with its quotes; valid for any input. What printable() escapes becomes a \u escape;
// bytes that are not UTF-8 become U+FFFD.
void append_json_string(std::string_view text, std::string& out);

}  // namespace tessera
