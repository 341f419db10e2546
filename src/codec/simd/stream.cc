#include "codec/simd/stream.h"

#include <hwy/cache_control.h>

#include "codec/simd/kernel_set.h"

namespace tessera {

void copy_stream(void* dst, const void* src, size_t n) {
  copy_stream_rows(dst, 0, src, 0, n, 1);
}

void copy_stream_rows(void* dst, ptrdiff_t dst_stride, const void* src, ptrdiff_t src_stride, size_t row_bytes,
                      size_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  codec::active_kernels().stream->copy_rows(static_cast<std::byte*>(dst), dst_stride,
                                            static_cast<const std::byte*>(src), src_stride, row_bytes, rows);
}

void stream_fence() {
  hwy::FlushStream();
}

}  // namespace tessera
