// Rearranges planes that were gathered: no arithmetic, only moves.
#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "codec/parallel.h"
#include "codec/quant/row_coder.h"

namespace tessera {
namespace {

constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 4;

// The place of a scale: tiles of 128 x 4, 512 bytes each.
int64_t swizzled(int64_t r, int64_t c, int64_t columns) {
  return ((r / kTileRows * (columns / kTileColumns) + c / kTileColumns) * 32 + r % 32) * 16 + r % kTileRows / 32 * 4 +
         c % kTileColumns;
}

}  // namespace

void gemm_scales(const QuantSpec& spec, Plane plane, int64_t rows, int64_t columns, const std::byte* scales,
                 int64_t scale_stride, std::byte* to) {
  const PlaneShape shape = plane_shape(spec, plane, rows, columns);
  if (shape.gemm_bytes() == 0) return;
  std::memset(to, 0, static_cast<size_t>(shape.gemm_bytes()));
  if (shape.scale_dtype == DType::kF32) {
    for (int64_t r = 0; r < shape.scale_rows; ++r)
      std::memcpy(to + r * bytes_of(shape.scale_dtype, shape.gemm_columns), scales + r * scale_stride,
                  static_cast<size_t>(shape.scale_row_bytes()));
    return;
  }
  const bool upright = plane == Plane::kColumn && shape.scale_dtype == DType::kF8E8M0;
  for (int64_t r = 0; r < shape.scale_rows; ++r)
    for (int64_t c = 0; c < shape.scale_columns; ++c)
      to[upright ? swizzled(c, r, shape.gemm_rows) : swizzled(r, c, shape.gemm_columns)] = scales[r * scale_stride + c];
}

void deinterleave_columns(const std::byte* gathered, int64_t ranks, int64_t rows, int64_t row_bytes, std::byte* to,
                          Parallel parallel) {
  if (ranks < 1 || rows < 0 || row_bytes < 0)
    fail(ErrorCode::kInvalidArgument,
         "a gather of {} ranks, {} rows of {} bytes each: ranks are 1 or more, the others 0 or more"_message, ranks,
         rows, row_bytes);
  if (row_bytes == 0) return;
  constexpr int64_t kRows = 64;
  codec::for_each(static_cast<size_t>((rows + kRows - 1) / kRows), static_cast<size_t>(ranks * rows * row_bytes),
                  parallel, [&](size_t i) {
                    const int64_t first = static_cast<int64_t>(i) * kRows;
                    for (int64_t r = first; r < std::min(first + kRows, rows); ++r)
                      for (int64_t rank = 0; rank < ranks; ++rank)
                        std::memcpy(to + (r * ranks + rank) * row_bytes, gathered + (rank * rows + r) * row_bytes,
                                    static_cast<size_t>(row_bytes));
                  });
}

void transpose_plane(const QuantSpec& spec, int64_t rows, int64_t columns, const ConstPlaneMemory& row,
                     const PlaneMemory& column, Parallel parallel) {
  if (!column_is_transposed_row(spec))
    fail(ErrorCode::kInvalidArgument,
         "the column plane of {} is not its transposed row plane: that needs one scale, or square blocks that are "
         "rounded to nearest"_message,
         to_string(spec.format));
  const PlaneShape shape = plane_shape(spec, Plane::kRow, rows, columns);
  plane_shape(spec, Plane::kColumn, rows, columns);
  if (rows == 0 || columns == 0) return;
  const BlockShape block = block_shape(spec, Plane::kRow);
  if (block.columns == 0) std::memcpy(column.scales, row.scales, sizeof(float));
  const bool packed = shape.code_dtype == DType::kF4;
  const int64_t element = packed ? 1 : static_cast<int64_t>(sizeof(float));
  constexpr int64_t kStep = 128;
  codec::for_each(static_cast<size_t>((rows + kStep - 1) / kStep), static_cast<size_t>(shape.code_bytes()), parallel,
                  [&](size_t i) {
                    const int64_t r = static_cast<int64_t>(i) * kStep;
                    for (int64_t c = 0; c < columns; c += kStep) {
                      ConstPlaneMemory from = row;
                      PlaneMemory to = column;
                      from.codes += r * row.code_stride + bytes_of(shape.code_dtype, c);
                      to.codes += c * column.code_stride + bytes_of(shape.code_dtype, r);
                      if (block.columns != 0) {
                        from.scales += (packed ? r : r / block.rows) * row.scale_stride + c / block.columns * element;
                        to.scales += (packed ? c : c / block.rows) * column.scale_stride + r / block.columns * element;
                      }
                      codec::transpose_codes_and_scales(spec, std::min(kStep, rows - r), std::min(kStep, columns - c),
                                                        from, to);
                    }
                  });
}

}  // namespace tessera
