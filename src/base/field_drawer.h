// Random values of messages (base/fields.h), for tests and for the fuzzers' seeds. The same generator draws the same
// values on every machine.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "base/process.h"

namespace tessera {

// Draws each field within its limits. It ignores conditions between fields, so a reader may refuse the value.
class FieldDrawer {
 public:
  static constexpr bool kFills = true;
  static constexpr bool kReads = false;

  explicit FieldDrawer(std::mt19937_64& random) : random_(random) {}

  void operator()(std::string_view, bool& value) { value = draw(2) == 1; }
  template <Arithmetic T>
  void operator()(std::string_view, T& value) {
    constexpr uint64_t kSmall = 5;
    const uint64_t kind = draw(8);
    if constexpr (std::floating_point<T>)
      value = kind == 0 ? std::numeric_limits<T>::infinity() : static_cast<T>(draw(2 * kSmall)) / 4 - T{1};
    else if (kind == 0)
      value = static_cast<T>(random_());
    else
      value = kind == 1 ? std::numeric_limits<T>::max() : static_cast<T>(draw(kSmall));
  }
  template <Enumeration E>
  void operator()(std::string_view, E& value, E last) {
    value = static_cast<E>(draw(static_cast<uint64_t>(last) + 1));
  }
  void operator()(std::string_view, std::string& text, uint32_t most) {
    text.resize(draw(std::min(most, 20U) + 1));
    for (char& letter : text) letter = static_cast<char>(draw(256));
  }
  template <Described T>
  void operator()(std::string_view, T& value) {
    T::fields(*this, value);
  }
  // Values with hand-written functions keep their defaults.
  void operator()(std::string_view, Coded auto&) {}
  void operator()(std::string_view, Incarnation& value) {
    (*this)({}, value.boot_id, 64);
    (*this)({}, value.nonce);
    value.pid = static_cast<int32_t>(draw(1000)) + 1;
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view name, std::optional<T>& value, const Limits&... limits) {
    value.reset();
    if (draw(2) == 1) (*this)(name, value.emplace(T{}), limits...);
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view, std::vector<T>& items, uint32_t most, const Limits&... limits) {
    items.clear();
    for (uint64_t count = draw(std::min(most, 3U) + 1); count > 0; --count)
      (*this)({}, items.emplace_back(), limits...);
  }
  template <typename T, typename... Limits>
  void cut(std::string_view name, T& value, uint32_t most, const Limits&... limits) {
    (*this)(name, value, most, limits...);
  }
  template <typename T>
  void array(std::string_view, std::vector<T>& items, uint32_t most) {
    items.resize(draw(std::min(most, 3U) + 1));
    for (T& item : items) {
      if constexpr (Arithmetic<T>)
        (*this)({}, item);
      else
        for (std::byte& byte : std::as_writable_bytes(std::span(&item, 1))) byte = static_cast<std::byte>(draw(256));
    }
  }
  template <typename T, typename Write, typename Read>
  void coded(std::string_view, T&, const Write&, const Read&) {}
  template <typename T, typename Visit>
  void each(std::string_view, std::vector<T>& items, uint32_t most, size_t /*least*/, const Visit& visit) {
    items.clear();
    for (uint64_t count = draw(std::min(most, 3U) + 1); count > 0; --count) visit(*this, items.emplace_back());
  }
  void end_of_this_version() {}
  static std::string_view what() { return {}; }
  template <typename... Args>
  void require(bool, fmt::format_string<const Args&...>, const Args&...) {}
  template <typename... Args>
  void require(ErrorCode, bool, fmt::format_string<const Args&...>, const Args&...) {}

 private:
  uint64_t draw(uint64_t below) { return random_() % below; }

  std::mt19937_64& random_;
};

// A value that a reader accepts. A few draws find one.
template <typename Message>
Message draw_message(std::mt19937_64& random) {
  for (int attempt = 0; attempt < 10'000; ++attempt) {
    Message message;
    FieldDrawer fields(random);
    fields({}, message);
    try {
      (void)read_message<Message>(message_bytes(message), "drawn");
      return message;
    } catch (const Error&) {
    }
  }
  throw Error(ErrorCode::kInternal, "no value that a reader takes");
}

}  // namespace tessera
