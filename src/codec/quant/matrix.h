// Checks of matrices for the codec's sources.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/quantize.h"

namespace tessera::codec {

// Throws unless the view is of f32, f16 or bf16, with a valid shape and stride.
void check_matrix(const MatrixView& matrix);
// Throws unless a matrix of this dtype with so many rows can go through the Hadamard transform.
void check_hadamard(DType dtype, int64_t rows);

// Index in the kernels' tables.
inline size_t index_of(DType dtype) {
  return static_cast<size_t>(dtype) - static_cast<size_t>(DType::kF32);
}

inline size_t code_index(DType codes) {
  return codes == DType::kF4 ? 2 : codes == DType::kF8E5M2 ? 1 : 0;
}

inline int64_t row_bytes_apart(const MatrixView& matrix) {
  return matrix.row_stride * bytes_of(matrix.dtype, 1);
}
inline const std::byte* row_of(const MatrixView& matrix, int64_t row) {
  return static_cast<const std::byte*>(matrix.data) + row * row_bytes_apart(matrix);
}

}  // namespace tessera::codec
