#include "collective/movement/copy_rows.h"

#include <unistd.h>

#include <cstring>

#include "codec/quant/decode.h"
#include "codec/simd/cast.h"
#include "codec/simd/stream.h"

namespace tessera::collective {
namespace {

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

void decode(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to, bool past_caches) {
  const float amax = weight.amax == nullptr ? 0 : *weight.amax;
  codec::PlaneDecoder(*weight.spec, weight.plane, weight.columns, to.dtype)
      .rows(from.plane, from.count, 0, from.count, amax, to, past_caches);
}

}  // namespace

bool goes_past_caches(int64_t bytes) {
  static const int64_t cache_bytes = [] {
    const long found = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
    return found > 0 ? int64_t{found} : int64_t{1} << 20;
  }();
  return bytes > cache_bytes;
}

void copy_rows(const PublishedWeight& weight, const PublishedRows& from, const MatrixMemory& to, bool past_caches) {
  if (from.count == 0 || weight.columns == 0) return;
  const MatrixMemory rows = rows_of(to, from.begin, from.count);
  weight.spec ? decode(weight, from, rows, past_caches) : copy_plain(weight, from, rows, past_caches);
}

}  // namespace tessera::collective
