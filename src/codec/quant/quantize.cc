#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/fail.h"
#include "codec/parallel.h"
#include "codec/quant/block_scaler.h"
#include "codec/quant/hadamard.h"
#include "codec/quant/matrix.h"
#include "codec/quant/tile.h"
#include "codec/simd/cast.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace codec {
namespace {

void check_amax(const QuantSpec& spec, float amax, std::string_view plane) {
  if (!(amax >= 0))
    fail(ErrorCode::kInvalidArgument, "the {} plane's amax is {}: it is a magnitude, 0 or more"_message, plane, amax);
  if (spec.nonfinite == Nonfinite::kPropagate) return;
  if (amax > kLargestF32)
    fail(ErrorCode::kInvalidArgument,
         "the {} plane's amax is infinite: pass nonfinite=propagate to quantise it"_message, plane);
  if (spec.format == Format::kNvfp4 && amax != 0 && (amax < kLeastNvAmax || amax > kMostNvAmax))
    fail(
        ErrorCode::kInvalidArgument,
        "the {} plane's amax is {}: nvfp4 takes 0 and {} to {}; rescale the tensor, or pass nonfinite=propagate"_message,
        plane, amax, kLeastNvAmax, kMostNvAmax);
}

void check_memory(const PlaneMemory& memory, const PlaneShape& shape, Plane plane) {
  if (memory.codes == nullptr) return;
  const auto check = [&](std::string_view what, int64_t stride, int64_t bytes, int64_t rows) {
    if (rows > 1 && stride < bytes)
      fail(ErrorCode::kInvalidArgument, "{} of the {} plane: rows of {} bytes that are {} apart overlap"_message, what,
           to_string(plane), bytes, stride);
  };
  check("codes", memory.code_stride, shape.code_row_bytes(), shape.code_rows);
  check("scales", memory.scale_stride, shape.scale_row_bytes(), shape.scale_rows);
  if (memory.scales == nullptr)
    fail(ErrorCode::kInvalidArgument, "the {} plane has memory for codes but none for scales"_message,
         to_string(plane));
}

[[noreturn]] void fail_nonfinite(const MatrixView& matrix, Parallel parallel) {
  const Amax found = compute_amax({&matrix, 1}, parallel)[0];
  if (found.nonfinite == 0)
    fail(ErrorCode::kInvalidArgument,
         "the Hadamard transform of a matrix with an amax of {} overflows bf16: rescale the tensor, or pass "
         "nonfinite=propagate"_message,
         found.value);
  fail(
      ErrorCode::kInvalidArgument,
      "{} of {} elements are NaN or infinite, the first at [{}, {}]: fix the tensor, or pass nonfinite=propagate"_message,
      found.nonfinite, matrix.rows * matrix.columns, found.first_nonfinite / matrix.columns,
      found.first_nonfinite % matrix.columns);
}

// Stores what is written once for a tensor with one scale.
void store_one_scale(const QuantSpec& spec, float amax, DType input, const PlaneMemory& plane) {
  if (plane.codes == nullptr) return;
  const float stored = BlockScaler(spec, amax, input).whole().stored;
  std::memcpy(plane.scales, &stored, sizeof(stored));
}

}  // namespace
}  // namespace codec

void quantize(const MatrixView& matrix, const QuantSpec& spec, PlaneAmax amax, const Planes& planes, Parallel parallel,
              const Origin& origin, const float* noop) {
  codec::check_matrix(matrix);
  check_spec(spec);
  const bool column = planes.column.codes != nullptr;
  if (planes.row.codes != nullptr)
    codec::check_memory(planes.row, plane_shape(spec, Plane::kRow, matrix.rows, matrix.columns), Plane::kRow);
  if (column) {
    codec::check_memory(planes.column, plane_shape(spec, Plane::kColumn, matrix.rows, matrix.columns), Plane::kColumn);
    if (spec.hadamard) codec::check_hadamard(matrix.dtype, matrix.rows);
  }
  if (needs_amax(spec.format)) {
    if (planes.row.codes != nullptr) codec::check_amax(spec, amax.row, "row");
    if (column) codec::check_amax(spec, amax.column, "column");
  }
  if (noop != nullptr && *noop != 0) return;
  if (planes.row.codes == nullptr && !column) return;
  if (block_shape(spec, Plane::kRow).columns == 0) {
    codec::store_one_scale(spec, amax.row, matrix.dtype, planes.row);
    codec::store_one_scale(spec, amax.column, matrix.dtype, planes.column);
  }
  const codec::TileGrid tiles(matrix, spec, planes);
  const auto bytes = static_cast<size_t>(bytes_of(matrix.dtype, matrix.rows * matrix.columns));
  std::atomic<bool> nonfinite = false;
  codec::for_each(tiles.size(), bytes, parallel, [&](size_t i) {
    thread_local codec::TileScratch scratch;
    if (codec::quantize_tile(tiles, i, amax, origin, scratch)) nonfinite = true;
  });
  if (nonfinite && spec.nonfinite == Nonfinite::kError) codec::fail_nonfinite(matrix, parallel);
}

}  // namespace tessera
