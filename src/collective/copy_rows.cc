#include "collective/copy_rows.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "codec/simd/cast.h"
#include "codec/simd/stream.h"

namespace tessera::collective {
namespace {

int64_t second_cache_bytes() {
  static const int64_t bytes = [] {
    const long found = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
    return found > 0 ? int64_t{found} : int64_t{1} << 20;
  }();
  return bytes;
}

// Rows of the matrix that begin at `row`.
MatrixMemory rows_of(const MatrixMemory& whole, int64_t row, int64_t rows) {
  MatrixMemory part = whole;
  part.data = static_cast<std::byte*>(whole.data) + bytes_of(whole.dtype, row * whole.row_stride);
  part.rows = rows;
  return part;
}

void copy_plain(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to, bool past_caches) {
  const bool contiguous = to.row_stride == weight.columns;
  const int64_t lines = contiguous ? 1 : from.count;
  const int64_t elements = contiguous ? from.count * weight.columns : weight.columns;
  const int64_t to_stride = bytes_of(to.dtype, contiguous ? elements : to.row_stride);
  auto* out = static_cast<std::byte*>(to.data);
  if (weight.dtype == to.dtype) {
    const auto bytes = static_cast<size_t>(bytes_of(to.dtype, elements));
    if (past_caches)
      return copy_stream_rows(out, to_stride, from.data, static_cast<ptrdiff_t>(bytes), bytes,
                              static_cast<size_t>(lines));
    for (int64_t line = 0; line < lines; ++line)
      std::memcpy(out + line * to_stride, from.data + line * static_cast<int64_t>(bytes), bytes);
    return;
  }
  const CastRow cast = (past_caches ? cast_row_stream : cast_row)(weight.dtype, to.dtype);
  for (int64_t line = 0; line < lines; ++line)
    cast(from.data + bytes_of(weight.dtype, line * elements), out + line * to_stride, static_cast<size_t>(elements));
}

// The plane of rows [first, ...) of the owner's; `first` begins a block.
ConstPlaneMemory plane_from(const PublishedWeight& weight, const ConstPlaneMemory& plane, const PlaneShape& shape,
                            int64_t first) {
  const int64_t high = std::max<int64_t>(block_shape(*weight.spec, weight.plane).rows, 1);
  const bool one_scale = block_shape(*weight.spec, weight.plane).rows == 0;
  const bool transposed = weight.plane == Plane::kColumn && shape.scale_dtype != DType::kF8E8M0;
  ConstPlaneMemory band = plane;
  if (transposed) {
    band.codes += bytes_of(shape.code_dtype, first);
    if (!one_scale) band.scales += bytes_of(shape.scale_dtype, first / high);
    return band;
  }
  const int64_t scale_row = one_scale ? 0 : shape.scale_rows == shape.code_rows ? first : first / high;
  band.codes += first * plane.code_stride;
  band.scales += scale_row * plane.scale_stride;
  return band;
}

// Band by band, so that what is decoded stays cached until all of it is written. Blocks are at most 128 rows high.
void decode(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to) {
  constexpr int64_t kBlockRows = 128;
  constexpr int64_t kBandBytes = int64_t{256} << 10;
  const PlaneShape shape = plane_shape(*weight.spec, weight.plane, from.count, weight.columns);
  const int64_t row_bytes = std::max<int64_t>(bytes_of(to.dtype, weight.columns), 1);
  const int64_t step = std::max(kBandBytes / row_bytes / kBlockRows, int64_t{1}) * kBlockRows;
  const float amax = weight.amax == nullptr ? 0 : *weight.amax;
  for (int64_t first = 0; first < from.count; first += step)
    dequantize(*weight.spec, weight.plane, plane_from(weight, from.plane, shape, first), amax,
               rows_of(to, first, std::min(step, from.count - first)));
}

}  // namespace

void copy_rows(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to) {
  if (from.count == 0 || weight.columns == 0) return;
  const MatrixMemory rows = rows_of(to, from.begin, from.count);
  if (weight.spec) return decode(weight, from, rows);
  copy_plain(weight, from, rows, bytes_of(to.dtype, weight.rows * weight.columns) > second_cache_bytes());
}

}  // namespace tessera::collective
