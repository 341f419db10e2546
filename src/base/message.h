// The texts of errors and warnings, marked where they are thrown: "..."_message. Each has an entry in
// docs/troubleshooting.md. A value; thread-safe.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>

namespace tessera {

// Converts to a format string that fmt checks at compile time, and to text.
struct MessageText {
  const char* text;
  size_t size;
  // NOLINTNEXTLINE(google-explicit-constructor): it stands for the literal
  constexpr operator fmt::string_view() const { return {text, size}; }
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator std::string() const { return {text, size}; }
};

consteval MessageText operator""_message(const char* text, size_t size) {
  return {text, size};
}

// A parameter type that accepts only a marked format, checked against the types of the arguments.
template <typename... Args>
struct MessageFormat {
  // NOLINTNEXTLINE(google-explicit-constructor)
  consteval MessageFormat(MessageText marked) : format(marked) {}
  fmt::format_string<Args...> format;
};

}  // namespace tessera
