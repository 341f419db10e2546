// A base for SAX handlers of nlohmann::json::sax_parse: every event that a handler does not expect is an error of the
// file. Such a handler accepts only a few shapes of JSON, so that nesting is limited by construction: the parser has no
// stack of nested frames, and nothing is built for refused input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "base/escape.h"
#include "base/fail.h"

namespace tessera::checkpoint {

// Derived classes hide the events that they accept and provide `std::string where() const`, the parser's position.
template <typename Derived>
class JsonEvents {
  friend Derived;
  JsonEvents() = default;

 public:
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(int64_t value) { return unexpected(fmt::format("the number {}", value)); }
  bool number_unsigned(uint64_t value) { return unexpected(fmt::format("the number {}", value)); }
  bool number_float(double, const std::string& text) {
    return unexpected(fmt::format("the number {}", std::string_view(text).substr(0, 40)));
  }
  bool string(std::string&) { return unexpected("a string"); }
  template <typename Binary>
  bool binary(Binary&) {
    return unexpected("binary data");
  }
  bool start_object(size_t) { return unexpected("an object"); }
  bool start_array(size_t) { return unexpected("an array"); }
  bool key(std::string&) { return unexpected("a key"); }
  bool end_object() { return true; }
  bool end_array() { return true; }
  bool parse_error(size_t position, const std::string& token, const std::exception&) {
    fail(ErrorCode::kInvalidArgument, "{}: not JSON at byte {}, near {}"_message, where(), position,
         in_quotes(std::string_view(token).substr(0, 40)));
  }

 protected:
  [[noreturn]] bool unexpected(std::string_view what) const {
    fail(ErrorCode::kInvalidArgument, "{}: {} is out of place"_message, where(), what);
  }

 private:
  std::string where() const { return static_cast<const Derived*>(this)->where(); }
};

}  // namespace tessera::checkpoint
