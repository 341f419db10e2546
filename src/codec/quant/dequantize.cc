#include <algorithm>

#include "codec/parallel.h"
#include "codec/quant/decode.h"
#include "codec/quant/matrix.h"
#include "codec/simd/stream.h"

namespace tessera {
namespace {

// Larger than the caches that are a core's share.
constexpr int64_t kStreamBytes = int64_t{32} << 20;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

void dequantize(const QuantSpec& spec, Plane plane, const ConstPlaneMemory& from, float amax, const MatrixMemory& to,
                Parallel parallel) {
  codec::check_matrix({to.data, to.dtype, to.rows, to.columns, to.row_stride});
  plane_shape(spec, plane, to.rows, to.columns);
  if (to.rows == 0 || to.columns == 0) return;
  const codec::PlaneDecoder decoder(spec, plane, to.columns, to.dtype);
  const int64_t high = decoder.transposed() ? 128 : 32;
  const int64_t wide = 4096;
  const int64_t down = ceil_div(to.rows, high);
  const int64_t across = ceil_div(to.columns, wide);
  const int64_t bytes = bytes_of(to.dtype, to.rows * to.columns);
  const bool stream = bytes >= kStreamBytes;
  codec::for_each(static_cast<size_t>(down * across), static_cast<size_t>(bytes), parallel, [&](size_t i) {
    const int64_t row = static_cast<int64_t>(i) / across * high;
    const int64_t column = static_cast<int64_t>(i) % across * wide;
    const codec::DecodeBox box{.first_row = row,
                               .rows = std::min(high, to.rows - row),
                               .first_column = column,
                               .columns = std::min(wide, to.columns - column)};
    std::byte* data = static_cast<std::byte*>(to.data) + bytes_of(to.dtype, row * to.row_stride + column);
    decoder.box(from, to.rows, box, amax, {data, to.dtype, box.rows, box.columns, to.row_stride}, stream);
    if (stream) stream_fence();
  });
}

}  // namespace tessera
