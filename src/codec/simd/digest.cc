#include "codec/simd/digest.h"

#include "base/fail.h"
#include "codec/simd/kernel_set.h"

namespace tessera {

std::string Digest::to_string() const {
  return fmt::format("{:016x}{:016x}", d[0], d[1]);
}

void digest_bytes(Digest& digest, uint64_t image_offset, const std::byte* data, size_t n) {
  digest_rows(digest, image_offset, n, data, static_cast<ptrdiff_t>(n), n, 1);
}

void digest_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, const std::byte* data,
                 ptrdiff_t data_stride, size_t row_bytes, size_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  codec::active_kernels().digest->rows({data, data_stride, image_offset, image_stride, row_bytes, rows}, digest.d);
}

void digest_copy_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, std::byte* dst,
                      ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes, size_t rows) {
  if (row_bytes == 0 || rows == 0) return;
  codec::active_kernels().digest->copy_rows({src, src_stride, image_offset, image_stride, row_bytes, rows}, dst,
                                            dst_stride, digest.d);
}

}  // namespace tessera
