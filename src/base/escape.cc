#include "base/escape.h"

#include <fmt/format.h>

#include <cstdint>
#include <iterator>

namespace tessera {
namespace {

struct Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool valid = false;
};

// The first character of a non-empty text, in UTF-8 as RFC 3629 defines it (no surrogates, no overlong forms).
Character first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {.code = lead, .valid = true};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7fU >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[bytes] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return {};
  return {.code = code, .bytes = bytes, .valid = true};
}

bool is_harmless(uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
  const bool turns = code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
                     (code >= 0x2066 && code <= 0x2069) || code == 0x061c;
  return !control && !turns;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character next = first_character(text);
    if (next.valid && is_harmless(next.code)) {
      out += text.substr(0, next.bytes);
    } else if (next.valid && next.code > 0xff) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", next.code);
    } else {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", next.valid ? next.code : static_cast<uint8_t>(text.front()));
    }
    text.remove_prefix(next.bytes);
  }
  return out;
}

std::string in_quotes(std::string_view text) {
  constexpr std::string_view kEscaped = "\"\\\n\r\t";
  constexpr std::string_view kLetters = "\"\\nrt";
  std::string escaped;
  for (const char c : text) {
    const size_t at = kEscaped.find(c);
    if (at != std::string_view::npos) escaped += '\\';
    escaped += at == std::string_view::npos ? c : kLetters[at];
  }
  return '"' + printable(escaped) + '"';
}

void append_json_string(std::string_view text, std::string& out) {
  out += '"';
  while (!text.empty()) {
    const Character next = first_character(text);
    if (!next.valid) {
      out += "\\ufffd";
    } else if (next.code == '"' || next.code == '\\') {
      out += '\\';
      out += text.front();
    } else if (is_harmless(next.code)) {
      out += text.substr(0, next.bytes);
    } else {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", next.code);
    }
    text.remove_prefix(next.bytes);
  }
  out += '"';
}

}  // namespace tessera
