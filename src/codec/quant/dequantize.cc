#include <algorithm>
#include <array>
#include <cstring>

#include "base/fail.h"
#include "codec/parallel.h"
#include "codec/quant/block_scaler.h"
#include "codec/quant/matrix.h"
#include "codec/quant/row_coder.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace codec {
namespace {

// Rows of a plane whose blocks run along them or, in MXFP8's column plane, across them.
class RowDecoder {
 public:
  RowDecoder(const QuantSpec& spec, Plane plane, const ConstPlaneMemory& from, float amax, const PlaneShape& shape)
      : kernels_(*active_kernels().quantize),
        from_(from),
        shape_(shape),
        code_(code_index(shape.code_dtype)),
        upright_(shape.scale_dtype == DType::kF8E8M0 && plane == Plane::kColumn),
        block_(block_shape(spec, Plane::kRow)) {
    if (shape.scale_dtype != DType::kF32) table_ = scale_table(spec.format, amax);
  }

  // Decodes `columns` of a row from `column` on, which begins a block; `scales` is the caller's memory, one float for
  // each block.
  void decode(int64_t row, int64_t column, int64_t columns, DType to, float* scales, void* dst) const {
    const std::byte* codes = from_.codes + row * from_.code_stride + bytes_of(shape_.code_dtype, column);
    kernels_.decode[code_][index_of(to)](codes, static_cast<size_t>(columns),
                                         gather_scales(row, column, columns, scales), scales, dst);
  }

 private:
  // Returns how many elements share a scale.
  size_t gather_scales(int64_t row, int64_t column, int64_t columns, float* scales) const {
    if (block_.columns == 0) {
      std::memcpy(scales, from_.scales, sizeof(float));
      return kWholeRow;
    }
    const int64_t block = upright_ ? 1 : block_.columns;
    const int64_t high = upright_ ? block_.columns : shape_.scale_rows == shape_.code_rows ? 1 : block_.rows;
    const std::byte* line = from_.scales + row / high * from_.scale_stride;
    const int64_t first = column / block;
    const int64_t n = (columns + block - 1) / block;
    if (shape_.scale_dtype == DType::kF32) {
      std::memcpy(scales, line + first * static_cast<int64_t>(sizeof(float)), static_cast<size_t>(n) * sizeof(float));
    } else {
      for (int64_t b = 0; b < n; ++b) scales[b] = table_[static_cast<uint8_t>(line[first + b])];
    }
    return static_cast<size_t>(block);
  }

  const QuantizeKernels& kernels_;
  const ConstPlaneMemory from_;
  const PlaneShape shape_;
  const size_t code_;
  const bool upright_;
  const BlockShape block_;
  std::array<float, 256> table_{};
};

constexpr int64_t kTile = 128;

void decode_rows(const RowDecoder& decoder, const MatrixMemory& to, int64_t first, int64_t rows) {
  std::vector<float> scales(static_cast<size_t>(to.columns) + 1);
  const int64_t stride = to.row_stride * bytes_of(to.dtype, 1);
  for (int64_t r = first; r < first + rows; ++r)
    decoder.decode(r, 0, to.columns, to.dtype, scales.data(), static_cast<std::byte*>(to.data) + r * stride);
}

// Rows from `first` on of a transposed plane, which are columns of `to`.
void decode_transposed(const RowDecoder& decoder, const MatrixMemory& to, int64_t first, int64_t columns) {
  const int64_t element = bytes_of(to.dtype, 1);
  std::vector<float> scales(kTile + 1);
  std::vector<std::byte> tile(static_cast<size_t>(kTile * kTile * element));
  for (int64_t row = 0; row < to.rows; row += kTile) {
    const int64_t rows = std::min(kTile, to.rows - row);
    for (int64_t c = 0; c < columns; ++c)
      decoder.decode(first + c, row, rows, to.dtype, scales.data(), tile.data() + c * rows * element);
    std::byte* dst = static_cast<std::byte*>(to.data) + (row * to.row_stride + first) * element;
    active_kernels().transpose->elements[element / 2](tile.data(), static_cast<size_t>(rows * element),
                                                      static_cast<size_t>(columns), static_cast<size_t>(rows), dst,
                                                      static_cast<size_t>(to.row_stride * element));
  }
}

}  // namespace
}  // namespace codec

void dequantize(const QuantSpec& spec, Plane plane, const ConstPlaneMemory& from, float amax, const MatrixMemory& to,
                Parallel parallel) {
  codec::check_matrix({to.data, to.dtype, to.rows, to.columns, to.row_stride});
  const PlaneShape shape = plane_shape(spec, plane, to.rows, to.columns);
  if (to.rows == 0 || to.columns == 0) return;
  if (spec.hadamard && plane == Plane::kColumn)
    fail(
        ErrorCode::kInvalidArgument,
        "the column plane holds the Hadamard transform of the matrix, not the matrix: dequantize the row plane"_message);
  const codec::RowDecoder decoder(spec, plane, from, amax, shape);
  const bool transposed = shape.code_rows != to.rows || shape.code_columns != to.columns ||
                          (plane == Plane::kColumn && shape.scale_dtype != DType::kF8E8M0);
  const int64_t step = transposed ? codec::kTile : 16;
  const int64_t lines = transposed ? to.columns : to.rows;
  const auto bytes = static_cast<size_t>(bytes_of(to.dtype, to.rows * to.columns));
  codec::for_each(static_cast<size_t>((lines + step - 1) / step), bytes, parallel, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * step;
    const int64_t n = std::min(step, lines - first);
    (transposed ? codec::decode_transposed : codec::decode_rows)(decoder, to, first, n);
  });
}

}  // namespace tessera
