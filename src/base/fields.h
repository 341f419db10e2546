// One description of a message serves to write, read and print it, and to draw random values for tests
// (base/fields_testing.h). A struct lists its members in wire order, each with its limits:
//
//   struct Attach {
//     std::string pair;
//     Purpose purpose = Purpose::kPull;
//     std::vector<Place> places;
//     static void fields(auto& f, auto& self) {
//       f("pair", self.pair, kMaxNameBytes);            // a string: its largest size in bytes
//       f("purpose", self.purpose, Purpose::kAgree);    // an enum of 0..last: its last enumerator
//       f("places", self.places, kMaxPlaces);           // a vector: its largest size, then the limits of each element
//       f.require(!self.places.empty(), "Attach: no places");  // checked by readers
//     }
//   };
//
// Numbers, bools, std::optional (preceded by a flag) and structs with fields(), or with their own write() and read(),
// take no limit. Later fields may depend on earlier ones, and errors may name f.what(), the message that is read. A
// value whose form in memory differs from the wire goes through a local variable, which is copied back `if constexpr
// (kFills<decltype(f)>)`.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/enum_name.h"
#include "base/escape.h"
#include "base/fail.h"

namespace tessera {

class FieldWriter;

template <typename Fields>
inline constexpr bool kFills = std::remove_cvref_t<Fields>::kFills;
template <typename Fields>
inline constexpr bool kReads = std::remove_cvref_t<Fields>::kReads;

template <typename T>
concept Described = requires(FieldWriter& f, const T& value) { T::fields(f, value); };
template <typename T>
concept Coded = !Described<T> && requires(const T& value, ByteWriter& out, ByteReader& in) {
  value.write(out);
  { T::read(in) } -> std::same_as<T>;
};
template <typename T>
concept Arithmetic = std::is_arithmetic_v<T>;
template <typename T>
concept Enumeration = std::is_enum_v<T>;

class FieldWriter {
 public:
  static constexpr bool kFills = false;  // whether it sets fields; otherwise it only looks at them
  static constexpr bool kReads = false;  // and whether it checks what require() demands

  explicit FieldWriter(ByteWriter& out) : out_(out) {}

  void operator()(std::string_view, const Arithmetic auto& value) { out_.put(value); }
  template <Enumeration E>
  void operator()(std::string_view, const E& value, E) {
    out_.put(value);
  }
  void operator()(std::string_view, const std::string& text, uint32_t) { out_.put_string(text); }
  void operator()(std::string_view, const Described auto& value) {
    std::decay_t<decltype(value)>::fields(*this, value);
  }
  void operator()(std::string_view, const Coded auto& value) { value.write(out_); }
  template <typename T, typename... Limits>
  void operator()(std::string_view name, const std::optional<T>& value, const Limits&... limits) {
    out_.put(value.has_value());
    if (value) (*this)(name, *value, limits...);
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view, const std::vector<T>& items, uint32_t, const Limits&... limits) {
    list(items, limits...);
  }
  // Takes the first `most` bytes or elements.
  void cut(std::string_view, std::string_view text, uint32_t most) { out_.put_string(text.substr(0, most)); }
  template <typename T, typename... Limits>
  void cut(std::string_view, const std::vector<T>& items, uint32_t most, const Limits&... limits) {
    list(std::span(items).first(std::min<size_t>(items.size(), most)), limits...);
  }
  // Elements that travel as they are in memory, after their size in bytes.
  template <typename T>
    requires std::is_trivially_copyable_v<T>
  void array(std::string_view, const std::vector<T>& items, uint32_t) {
    out_.put_bytes(std::as_bytes(std::span(items)));
  }
  // A value with its own functions: write(value, ByteWriter&) and read(ByteReader&).
  template <typename T, typename Write, typename Read>
  void coded(std::string_view, const T& value, const Write& write, const Read&) {
    write(value, out_);
  }
  // Elements that need a function: visit(f, element). Each takes at least `least` bytes.
  template <typename Items, typename Visit>
  void each(std::string_view, const Items& items, uint32_t, size_t /*least*/, const Visit& visit) {
    out_.put(static_cast<uint32_t>(items.size()));
    for (const auto& item : items) visit(*this, item);
  }
  // Skips what a later version may add after this.
  void end_of_this_version() {}
  static std::string_view what() { return {}; }
  // A reader throws Error unless `ok`; the default code is kInvalidArgument.
  template <typename... Args>
  void require(bool, std::type_identity_t<MessageFormat<const Args&...>>, const Args&...) {}
  template <typename... Args>
  void require(ErrorCode, bool, std::type_identity_t<MessageFormat<const Args&...>>, const Args&...) {}

 private:
  template <typename Items, typename... Limits>
  void list(const Items& items, const Limits&... limits) {
    out_.put(static_cast<uint32_t>(items.size()));
    for (const auto& item : items) (*this)({}, item, limits...);
  }

  ByteWriter& out_;
};

// The fewest bytes that a T takes.
template <typename T>
size_t least_bytes() {
  if constexpr (Arithmetic<T> || Enumeration<T>) {
    return sizeof(T);
  } else if constexpr (std::same_as<T, std::string>) {
    return sizeof(uint32_t);
  } else {
    static const size_t bytes = [] {
      ByteWriter out;
      FieldWriter fields(out);
      fields({}, T{});
      return out.size();
    }();
    return bytes;
  }
}

class FieldReader {
 public:
  static constexpr bool kFills = true;
  static constexpr bool kReads = true;

  explicit FieldReader(ByteReader& in) : in_(in) {}

  void operator()(std::string_view, bool& value) { value = in_.get_bool(); }
  template <Arithmetic T>
  void operator()(std::string_view, T& value) {
    value = in_.get<T>();
  }
  template <Enumeration E>
  void operator()(std::string_view, E& value, E last) {
    value = in_.get_enum(last);
  }
  void operator()(std::string_view, std::string& text, uint32_t most) { text = in_.get_string(most); }
  template <Described T>
  void operator()(std::string_view, T& value) {
    T::fields(*this, value);
  }
  template <Coded T>
  void operator()(std::string_view, T& value) {
    value = T::read(in_);
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view name, std::optional<T>& value, const Limits&... limits) {
    value.reset();
    if (in_.get_bool()) (*this)(name, value.emplace(T{}), limits...);
  }
  // Grows as elements are read, so that a short message cannot make it allocate much.
  template <typename T, typename... Limits>
  void operator()(std::string_view, std::vector<T>& items, uint32_t most, const Limits&... limits) {
    items.clear();
    for (uint32_t count = in_.get_count(most, least_bytes<T>()); count > 0; --count)
      (*this)({}, items.emplace_back(), limits...);
  }
  template <typename T, typename... Limits>
  void cut(std::string_view name, T& value, uint32_t most, const Limits&... limits) {
    (*this)(name, value, most, limits...);
  }
  // Reuses the memory that `items` already has.
  template <typename T>
    requires std::is_trivially_copyable_v<T>
  void array(std::string_view, std::vector<T>& items, uint32_t most) {
    const std::span<const std::byte> bytes = in_.get_bytes(most * static_cast<uint32_t>(sizeof(T)));
    if (bytes.size() % sizeof(T) != 0)
      fail(ErrorCode::kInvalidArgument, "{}: {} bytes are not a whole number of elements"_message, in_.what(),
           bytes.size());
    items.resize(bytes.size() / sizeof(T));
    std::ranges::copy(bytes, std::as_writable_bytes(std::span(items)).begin());
  }
  template <typename T, typename Write, typename Read>
  void coded(std::string_view, T& value, const Write&, const Read& read) {
    value = read(in_);
  }
  template <typename T, typename Visit>
  void each(std::string_view, std::vector<T>& items, uint32_t most, size_t least, const Visit& visit) {
    items.clear();
    for (uint32_t count = in_.get_count(most, least); count > 0; --count) visit(*this, items.emplace_back());
  }
  void end_of_this_version() { in_.skip_rest(); }
  std::string_view what() const { return in_.what(); }
  template <typename... Args>
  void require(bool ok, std::type_identity_t<MessageFormat<const Args&...>> text, const Args&... args) {
    require(ErrorCode::kInvalidArgument, ok, text, args...);
  }
  template <typename... Args>
  void require(ErrorCode code, bool ok, std::type_identity_t<MessageFormat<const Args&...>> text, const Args&... args) {
    if (!ok) throw Error(code, fmt::format(text.format, args...));
  }

 private:
  ByteReader& in_;
};

// For people: "rank=3 places=[{origin=8} +15]". Long texts and lists are truncated.
class FieldPrinter {
 public:
  static constexpr bool kFills = false;
  static constexpr bool kReads = false;

  explicit FieldPrinter(std::string& out) : out_(out) {}

  void operator()(std::string_view name, const Arithmetic auto& value) { put(name, fmt::format("{}", value)); }
  template <Enumeration E>
  void operator()(std::string_view name, const E& value, E) {
    put(name, fmt::format("{}", static_cast<int64_t>(value)));
  }
  void operator()(std::string_view name, const std::string& text, uint32_t) { cut(name, text, 0); }
  template <Described T>
  void operator()(std::string_view name, const T& value) {
    put(name, "{");
    T::fields(*this, value);
    out_ += '}';
  }
  void operator()(std::string_view name, const Coded auto& value) {
    ByteWriter bytes;
    value.write(bytes);
    put(name, fmt::format("({} bytes)", bytes.size()));
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view name, const std::optional<T>& value, const Limits&... limits) {
    value ? (*this)(name, *value, limits...) : put(name, "none");
  }
  template <typename T, typename... Limits>
  void operator()(std::string_view name, const std::vector<T>& items, uint32_t, const Limits&... limits) {
    list(name, items.size(), [&](size_t i) { (*this)({}, items[i], limits...); });
  }
  void cut(std::string_view name, std::string_view text, uint32_t) {
    put(name, fmt::format("\"{}\"{}", printable(text.substr(0, kMostBytes)), text.size() > kMostBytes ? "..." : ""));
  }
  template <typename T, typename... Limits>
  void cut(std::string_view name, const std::vector<T>& items, uint32_t most, const Limits&... limits) {
    (*this)(name, items, most, limits...);
  }
  template <typename T>
  void array(std::string_view name, const std::vector<T>& items, uint32_t) {
    list(name, items.size(), [&](size_t i) {
      if constexpr (Arithmetic<T>)
        (*this)({}, items[i]);
      else
        put({}, "*");
    });
  }
  template <typename T, typename Write, typename Read>
  void coded(std::string_view name, const T& value, const Write& write, const Read&) {
    ByteWriter bytes;
    write(value, bytes);
    put(name, fmt::format("({} bytes)", bytes.size()));
  }
  template <typename Items, typename Visit>
  void each(std::string_view name, const Items& items, uint32_t, size_t /*least*/, const Visit& visit) {
    list(name, items.size(), [&](size_t i) {
      put({}, "{");
      visit(*this, items[i]);
      out_ += '}';
    });
  }
  void end_of_this_version() {}
  static std::string_view what() { return {}; }
  template <typename... Args>
  void require(bool, std::type_identity_t<MessageFormat<const Args&...>>, const Args&...) {}
  template <typename... Args>
  void require(ErrorCode, bool, std::type_identity_t<MessageFormat<const Args&...>>, const Args&...) {}

 private:
  static constexpr size_t kMostBytes = 64;
  static constexpr size_t kMostItems = 8;

  void put(std::string_view name, std::string_view value) {
    if (!out_.empty() && out_.back() != '{' && out_.back() != '[') out_ += ' ';
    if (!name.empty()) out_.append(name) += '=';
    out_ += value;
  }
  template <typename Print>
  void list(std::string_view name, size_t size, const Print& print) {
    put(name, "[");
    for (size_t i = 0; i < std::min(size, kMostItems); ++i) print(i);
    out_ += size > kMostItems ? fmt::format(" +{}]", size - kMostItems) : "]";
  }

  std::string& out_;
};

inline constexpr auto kLastErrorCode = static_cast<uint8_t>(ErrorCode::kInternal);

// An error code in one byte; require(byte) checks it, at most kLastErrorCode.
template <typename Fields, typename Code, typename Require>
void error_code_field(Fields& f, Code& code, const Require& require) {
  auto byte = static_cast<uint8_t>(code);
  f("code", byte);
  require(byte);
  if constexpr (Fields::kFills) code = static_cast<ErrorCode>(std::min(byte, kLastErrorCode));
}
template <typename Fields, typename Code>
void error_code_field(Fields& f, Code& code) {
  error_code_field(f, code, [&](uint8_t byte) {
    f.require(byte <= kLastErrorCode, "message: unknown error code {}"_message, byte);
  });
}

// The text that follows an error code, truncated if it is long.
template <typename Fields, typename State>
void status_text_field(Fields& f, ErrorCode code, State& status, uint32_t most) {
  if constexpr (Fields::kFills) {
    std::string text;
    f.cut("text", text, most);
    status = code == ErrorCode::kOk ? Status() : Status(code, std::move(text));
  } else {
    f.cut("text", status.message(), most);
  }
}

// An error code and a text.
template <typename Fields, typename State>
void status_field(Fields& f, State& status, uint32_t most = 64 << 10) {
  ErrorCode code = status.code();
  error_code_field(f, code);
  status_text_field(f, code, status, most);
}

// A vector whose length takes one byte; require(length) checks it. Elements that need a function: visit(f, element).
template <typename Fields, typename Items, typename Require, typename Visit>
void short_list_field(Fields& f, std::string_view name, Items& items, const Require& require, const Visit& visit) {
  auto count = static_cast<uint8_t>(items.size());
  f(name, count);
  require(count);
  if constexpr (Fields::kFills) items.resize(count);
  for (auto& item : items) visit(f, item);
}
template <typename Fields, typename Items, typename Require>
void short_list_field(Fields& f, std::string_view name, Items& items, const Require& require) {
  short_list_field(f, name, items, require, [](auto& g, auto& item) { g({}, item); });
}

template <typename Message>
void write_fields(const Message& message, ByteWriter& out) {
  FieldWriter fields(out);
  fields({}, message);
}
template <typename Message>
std::vector<std::byte> message_bytes(const Message& message) {
  ByteWriter out;
  write_fields(message, out);
  return out.take();
}

template <typename Message>
void read_fields(ByteReader& in, Message& into) {
  FieldReader fields(in);
  fields({}, into);
}
template <typename Message>
Message read_fields(ByteReader& in) {
  Message message;
  read_fields(in, message);
  return message;
}
// Reads all of `bytes`; errors name `what`. Throws Error. `into` may bring memory to reuse.
template <typename Message>
void read_message(std::span<const std::byte> bytes, std::string_view what, Message& into) {
  ByteReader in(bytes, what);
  read_fields(in, into);
  in.finish();
}
template <typename Message>
Message read_message(std::span<const std::byte> bytes, std::string_view what) {
  Message message;
  read_message(bytes, what, message);
  return message;
}

// "Prepare{stream=true skipped=[3 4]}"
template <typename Message>
std::string message_text(const Message& message) {
  std::string text;
  FieldPrinter fields(text);
  fields({}, message);
  if constexpr (requires { Message::kType; }) return std::string(kNameOf<Message::kType>) + text;
  return text;
}

}  // namespace tessera
