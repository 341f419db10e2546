// Reads the text forms of layouts and shapes from left to right; errors say what was expected and where.
#pragma once

#include <string>
#include <string_view>

#include "tessera/layout.h"

namespace tessera {

// The text in double quotes, on one line: control characters are escaped, the middle of a long text is omitted.
std::string quoted(std::string_view text);

// Refers to the text, which must outlive it. Every error is Error(kInvalidArgument) of the form
//   <what> "<text>" at <position>: expected <expected>, got <token>
// with positions counted in bytes from 1.
class TextReader {
 public:
  TextReader(std::string_view what, std::string_view text) : what_(what), text_(text) {}

  bool at_end() const { return position_ == text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[position_]; }
  size_t position() const { return position_; }
  std::string_view rest() const { return text_.substr(position_); }
  void rewind(size_t position) { position_ = position; }
  // Skips `token` if it is next; returns whether it was.
  bool accept(std::string_view token);
  void expect(std::string_view token, std::string_view expected);
  void expect_end(std::string_view expected);
  // A decimal number from `low` to `high`: digits, with an optional '-' if `low` is negative.
  Index number(Index low, Index high, std::string_view expected);
  // A name like "fsdp" or "dp_shard": a letter or '_', then letters, digits, '_', '-' and '.'. Empty if none is next.
  std::string_view name();

  [[noreturn]] void fail_expected(std::string_view expected) const;
  // Throws "<what> "<text>": <message>", for errors of the text as a whole.
  [[noreturn]] void fail_whole(std::string_view message) const;

 private:
  std::string_view what_;
  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace tessera
