// Reading and writing binary messages, little-endian. A reader never trusts its input: it checks every read against the
// bytes that are left, and every length against a limit that the caller gives.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/fail.h"

namespace tessera {

static_assert(std::endian::native == std::endian::little, "Tessera's messages and files are little-endian");

// Appends to a growing buffer.
class ByteWriter {
 public:
  template <typename T>
    requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  void put(T value) {
    append(&value, sizeof(T));
  }
  void put_bytes(std::span<const std::byte> bytes) {  // length (u32), then the bytes
    put(static_cast<uint32_t>(bytes.size()));
    append(bytes.data(), bytes.size());
  }
  void put_string(std::string_view text) { put_bytes(std::as_bytes(std::span(text))); }

  // Clears the buffer and keeps its memory for the next message, but no more than `most` bytes of it.
  void clear(size_t most) {
    bytes_.clear();
    if (bytes_.capacity() > most) bytes_ = {};
  }
  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> view() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(const void* data, size_t size) {
    const size_t at = bytes_.size();
    bytes_.resize(at + size);
    if (size > 0) std::memcpy(bytes_.data() + at, data, size);
  }

  std::vector<std::byte> bytes_;
};

// Reads what a ByteWriter wrote. Every getter throws Error(kInvalidArgument), which names `what`, if the message is too
// short or a length exceeds its limit. A length is checked before anything is allocated for it.
class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  template <typename T>
    requires(std::is_arithmetic_v<T> && !std::same_as<T, bool>)
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  bool get_bool() {
    const auto value = get<uint8_t>();
    if (value > 1) fail(ErrorCode::kInvalidArgument, "{}: a flag is {}, neither 0 nor 1"_message, what_, value);
    return value == 1;
  }
  // An enum whose values are 0..last.
  template <typename E>
    requires std::is_enum_v<E>
  E get_enum(E last) {
    const auto value = get<std::underlying_type_t<E>>();
    if (value < 0 || value > static_cast<std::underlying_type_t<E>>(last))
      fail(ErrorCode::kInvalidArgument, "{}: unknown code {}"_message, what_, static_cast<int64_t>(value));
    return static_cast<E>(value);
  }
  // A count of elements, each of which takes at least `element_bytes` of what is left.
  uint32_t get_count(uint32_t limit, size_t element_bytes = 1) {
    const auto count = get<uint32_t>();
    if (count > limit || count * uint64_t{element_bytes} > left())
      fail(ErrorCode::kInvalidArgument, "{}: a count of {} where at most {} fit"_message, what_, count, limit);
    return count;
  }
  std::span<const std::byte> get_bytes(uint32_t limit) { return take(get_count(limit)); }
  std::string get_string(uint32_t limit) {
    const auto bytes = get_bytes(limit);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

  // For messages that a later version may extend.
  void skip_rest() { bytes_ = {}; }

  std::string_view what() const { return what_; }
  size_t left() const { return bytes_.size(); }
  std::span<const std::byte> rest() { return take(left()); }
  // Throws unless everything was read.
  void finish() const {
    if (!bytes_.empty()) fail(ErrorCode::kInvalidArgument, "{}: {} bytes too many"_message, what_, bytes_.size());
  }

 private:
  std::span<const std::byte> take(size_t count) {
    if (count > bytes_.size())
      fail(ErrorCode::kInvalidArgument, "{}: truncated, {} bytes wanted and {} left"_message, what_, count,
           bytes_.size());
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }

  std::span<const std::byte> bytes_;
  std::string_view what_;
};

}  // namespace tessera
