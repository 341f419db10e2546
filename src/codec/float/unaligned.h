// Elements of rows that may be unaligned.
#pragma once

#include <cstddef>
#include <cstring>

namespace tessera::codec {

template <typename T>
T load_at(const void* row, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(row) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store_at(void* row, size_t index, T value) {
  std::memcpy(static_cast<std::byte*>(row) + index * sizeof(T), &value, sizeof(T));
}

}  // namespace tessera::codec
