// How blocks*.cc traverse a box: in strips of columns that fit on the stack.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/quant/blocks.h"
#include "codec/quant/matrix.h"
#include "codec/simd/cast.h"

namespace tessera::codec {

inline constexpr int64_t kStrip = 2048;  // whole blocks of any format
inline constexpr int64_t kStripBlocks = kStrip / 16;

// Calls visit(column of the box, columns) for strips that end where blocks do.
template <typename Visit>
void for_each_strip(int64_t first_column, int64_t columns, const Visit& visit) {
  for (int64_t c = 0; c < columns;) {
    const int64_t n = std::min(columns - c, kStrip - (first_column + c) % kStrip);
    visit(c, n);
    c += n;
  }
}

// Calls visit(row of the box, rows, index of the touched block row) for the rows of each block row.
template <typename Visit>
void for_each_block_row(const BlockFormat& format, int64_t first_row, int64_t rows, const Visit& visit) {
  for (int64_t r = 0, i = 0; r < rows; ++i) {
    const int64_t n = std::min(rows - r, format.block_rows - (first_row + r) % format.block_rows);
    visit(r, n, i);
    r += n;
  }
}

// The parts of a strip: the rest of a block that begins before it, and blocks from their beginning on.
inline int64_t elements_before_block(const BlockFormat& format, int64_t column, int64_t n) {
  const int64_t within = column % format.block_columns;
  return within == 0 ? 0 : std::min(n, format.block_columns - within);
}

// The dtype that quantising treats a dtype as.
inline DType quantized_input(DType dtype) {
  return dtype == DType::kF64 ? DType::kF32 : dtype;
}

template <typename T>
void move_elements(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    T element;
    std::memcpy(&element, from + i * from_stride, sizeof(T));
    std::memcpy(to + i * to_stride, &element, sizeof(T));
  }
}
inline void move_elements(int64_t bytes, const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride,
                          int64_t n) {
  if (bytes == 2) return move_elements<uint16_t>(from, from_stride, to, to_stride, n);
  if (bytes == 4) return move_elements<uint32_t>(from, from_stride, to, to_stride, n);
  move_elements<uint64_t>(from, from_stride, to, to_stride, n);
}

// Rows of a box as the kernels take them.
class BoxReader {
 public:
  explicit BoxReader(const SourceBox& box)
      : box_(box), bytes_(bytes_of(box.dtype, 1)), cast_(cast_row(box.dtype, quantized_input(box.dtype))) {}

  // Whether read() returns the box's own memory.
  bool direct() const { return box_.column_stride == bytes_ && box_.dtype != DType::kF64; }
  // Columns [column, column + n) of a row, n <= kStrip; valid until the next call.
  const std::byte* read(int64_t row, int64_t column, int64_t n) {
    const std::byte* from = box_.data + row * box_.row_stride + column * box_.column_stride;
    if (box_.column_stride != bytes_) {
      move_elements(bytes_, from, box_.column_stride, gathered_.data(), bytes_, n);
      from = gathered_.data();
    }
    if (box_.dtype != DType::kF64) return from;
    cast_(from, rounded_.data(), static_cast<size_t>(n));
    return rounded_.data();
  }

 private:
  const SourceBox& box_;
  const int64_t bytes_;
  const CastRow cast_;
  alignas(64) std::array<std::byte, kStrip * sizeof(double)> gathered_;
  alignas(64) std::array<std::byte, kStrip * sizeof(float)> rounded_;
};

// Columns of a row on their way to a box; kernels write f32, f16 and bf16 contiguously.
class BoxWriter {
 public:
  explicit BoxWriter(const TargetBox& box)
      : box_(box), bytes_(bytes_of(box.dtype, 1)), cast_(cast_row(quantized_input(box.dtype), box.dtype)) {}

  // Where to write columns [column, column + n) of a row, n <= kStrip, before store() of the same.
  std::byte* place(int64_t row, int64_t column) {
    if (box_.dtype == DType::kF64) return rounded_.data();
    return box_.column_stride == bytes_ ? at(row, column) : gathered_.data();
  }
  void store(int64_t row, int64_t column, int64_t n) {
    const bool scattered = box_.column_stride != bytes_;
    if (box_.dtype == DType::kF64)
      cast_(rounded_.data(), scattered ? gathered_.data() : at(row, column), static_cast<size_t>(n));
    if (scattered) move_elements(bytes_, gathered_.data(), bytes_, at(row, column), box_.column_stride, n);
  }

 private:
  std::byte* at(int64_t row, int64_t column) const {
    return box_.data + row * box_.row_stride + column * box_.column_stride;
  }

  const TargetBox& box_;
  const int64_t bytes_;
  const CastRow cast_;
  alignas(64) std::array<std::byte, kStrip * sizeof(double)> gathered_;
  alignas(64) std::array<std::byte, kStrip * sizeof(float)> rounded_;
};

}  // namespace tessera::codec
