#include "layout/text_reader.h"

#include <charconv>

#include "base/fail.h"

namespace tessera {
namespace {

constexpr size_t kShown = 160;  // most bytes of a text that an error repeats

bool is_digit(char c) {
  return '0' <= c && c <= '9';
}
bool is_letter(char c) {
  return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_';
}

void append_escaped(std::string& out, std::string_view text) {
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c < ' ' || c == '\x7f') {
      fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
}

}  // namespace

std::string quoted(std::string_view text) {
  std::string out = "\"";
  if (text.size() <= kShown) {
    append_escaped(out, text);
  } else {
    append_escaped(out, text.substr(0, kShown / 2));
    out += "...";
    append_escaped(out, text.substr(text.size() - kShown / 2));
  }
  return out += '"';
}

bool TextReader::accept(std::string_view token) {
  if (text_.substr(position_, token.size()) != token) return false;
  position_ += token.size();
  return true;
}

void TextReader::expect(std::string_view token, std::string_view expected) {
  if (!accept(token)) fail_expected(expected);
}

void TextReader::expect_end(std::string_view expected) {
  if (!at_end()) fail_expected(expected);
}

Index TextReader::number(Index low, Index high, std::string_view expected) {
  const char* const begin = text_.data() + position_;
  Index value = 0;
  const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
  if (error != std::errc() || value < low || value > high || (low >= 0 && peek() == '-')) fail_expected(expected);
  position_ += static_cast<size_t>(end - begin);
  return value;
}

std::string_view TextReader::name() {
  if (!is_letter(peek())) return {};
  const size_t begin = position_;
  while (is_letter(peek()) || is_digit(peek()) || peek() == '-' || peek() == '.') ++position_;
  return text_.substr(begin, position_ - begin);
}

void TextReader::fail_expected(std::string_view expected) const {
  const size_t end = std::min(text_.find_first_of("@:,;[]", position_ + 1), text_.size());
  const std::string got = at_end() ? "the end" : quoted(text_.substr(position_, end - position_));
  fail(ErrorCode::kInvalidArgument, "{} {} at {}: expected {}, got {}"_message, what_, quoted(text_), position_ + 1,
       expected, got);
}

void TextReader::fail_whole(std::string_view message) const {
  fail(ErrorCode::kInvalidArgument, "{} {}: {}"_message, what_, quoted(text_), message);
}

}  // namespace tessera
