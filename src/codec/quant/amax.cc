#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/fail.h"
#include "base/mutex.h"
#include "codec/parallel.h"
#include "codec/quant/hadamard.h"
#include "codec/quant/matrix.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace codec {
namespace {

// About the amount of work that a thread takes at a time.
constexpr int64_t kPieceElements = int64_t{1} << 18;

struct AmaxPiece {
  size_t tensor;
  int64_t first_row;
  int64_t rows;
};

std::vector<AmaxPiece> pieces_of(std::span<const MatrixView> tensors) {
  std::vector<AmaxPiece> pieces;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].columns == 0) continue;
    const int64_t step = std::max<int64_t>(1, kPieceElements / tensors[t].columns);
    for (int64_t row = 0; row < tensors[t].rows; row += step)
      pieces.push_back({t, row, std::min(step, tensors[t].rows - row)});
  }
  return pieces;
}

bool finite_at(const MatrixView& matrix, int64_t row, int64_t column) {
  float amax = 0;
  const std::byte* element = row_of(matrix, row) + column * bytes_of(matrix.dtype, 1);
  return !scalar_amax().row[index_of(matrix.dtype)](element, 1, amax);
}

// Counts them in rows in which a kernel saw one.
void count_nonfinite(const MatrixView& matrix, int64_t row, Amax& amax) {
  for (int64_t column = 0; column < matrix.columns; ++column) {
    if (finite_at(matrix, row, column)) continue;
    const int64_t place = row * matrix.columns + column;
    if (amax.first_nonfinite < 0 || place < amax.first_nonfinite) amax.first_nonfinite = place;
    ++amax.nonfinite;
  }
}

Amax amax_of(const MatrixView& matrix, const AmaxPiece& piece) {
  Amax amax;
  const auto row_amax = active_kernels().amax->row[index_of(matrix.dtype)];
  if (matrix.row_stride == matrix.columns) {
    const auto elements = static_cast<size_t>(piece.rows * matrix.columns);
    if (!row_amax(row_of(matrix, piece.first_row), elements, amax.value)) return amax;
    amax = {};  // the rows tell where
  }
  for (int64_t row = piece.first_row; row < piece.first_row + piece.rows; ++row) {
    if (row_amax(row_of(matrix, row), static_cast<size_t>(matrix.columns), amax.value))
      count_nonfinite(matrix, row, amax);
  }
  return amax;
}

void merge(const Amax& from, Amax& into) {
  into.value = std::max(into.value, from.value);
  into.nonfinite += from.nonfinite;
  if (from.first_nonfinite >= 0 && (into.first_nonfinite < 0 || from.first_nonfinite < into.first_nonfinite))
    into.first_nonfinite = from.first_nonfinite;
}

}  // namespace
}  // namespace codec

void compute_amax(std::span<const MatrixView> tensors, std::span<Amax> out, Parallel parallel, const float* noop) {
  TESSERA_CHECK_EQ(tensors.size(), out.size());
  size_t bytes = 0;
  for (const MatrixView& tensor : tensors) {
    codec::check_matrix(tensor);
    bytes += static_cast<size_t>(bytes_of(tensor.dtype, tensor.rows * tensor.columns));
  }
  if (noop != nullptr && *noop != 0) return;
  std::ranges::fill(out, Amax{});
  const std::vector<codec::AmaxPiece> pieces = codec::pieces_of(tensors);
  Mutex mutex;
  codec::for_each(pieces.size(), bytes, parallel, [&](size_t i) {
    const Amax found = codec::amax_of(tensors[pieces[i].tensor], pieces[i]);
    const MutexLock lock(mutex);
    codec::merge(found, out[pieces[i].tensor]);
  });
}

std::vector<Amax> compute_amax(std::span<const MatrixView> tensors, Parallel parallel) {
  std::vector<Amax> out(tensors.size());
  compute_amax(tensors, out, parallel);
  return out;
}

Amax compute_hadamard_amax(const MatrixView& tensor, Parallel parallel) {
  codec::check_matrix(tensor);
  codec::check_hadamard(tensor.dtype, tensor.rows);
  constexpr int64_t kColumns = 1024;
  const int64_t groups = tensor.rows / static_cast<int64_t>(codec::kHadamard);
  const auto bytes = static_cast<size_t>(bytes_of(tensor.dtype, tensor.rows * tensor.columns));
  Mutex mutex;
  Amax amax;
  codec::for_each(static_cast<size_t>(groups), bytes, parallel, [&](size_t group) {
    std::vector<uint16_t> transformed(codec::kHadamard * kColumns);
    float largest = 0;
    bool nonfinite = false;
    for (int64_t column = 0; column < tensor.columns; column += kColumns) {
      const auto columns = static_cast<size_t>(std::min(kColumns, tensor.columns - column));
      const size_t stride = columns * sizeof(uint16_t);
      const auto first_row = static_cast<int64_t>(group * codec::kHadamard);
      codec::active_kernels().transpose->hadamard(codec::row_of(tensor, first_row) + column * 2,
                                                  static_cast<size_t>(tensor.row_stride) * sizeof(uint16_t), columns,
                                                  reinterpret_cast<std::byte*>(transformed.data()), stride);
      nonfinite |= codec::active_kernels().amax->row[codec::index_of(tensor.dtype)](
          transformed.data(), codec::kHadamard * columns, largest);
    }
    const MutexLock lock(mutex);
    amax.value = std::max(amax.value, largest);
    if (nonfinite) amax.nonfinite = 1;
  });
  if (amax.nonfinite == 0) return amax;
  const float value = amax.value;  // the value in the tensor itself, where the user will look for it
  amax = compute_amax({&tensor, 1}, parallel)[0];
  amax.value = value;
  return amax;
}

}  // namespace tessera
