#include <cstring>

#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

void copy_rows(std::byte* dst, ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes,
               size_t rows) {
  for (size_t row = 0; row < rows; ++row) {
    const auto r = static_cast<ptrdiff_t>(row);
    std::memcpy(dst + r * dst_stride, src + r * src_stride, row_bytes);
  }
}

}  // namespace

const StreamKernels& scalar_stream() {
  static constexpr StreamKernels kKernels{.target = "scalar", .copy_rows = copy_rows};
  return kKernels;
}

}  // namespace tessera::codec
