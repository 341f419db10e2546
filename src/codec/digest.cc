#include "codec/digest.h"

#include <algorithm>

#include "base/fail.h"
#include "codec/digest_tables.h"
#include "codec/kernel_set.h"
#include "codec/prefetch.h"

namespace tessera {
namespace {

using codec::block_multiplier;
using codec::DigestRows;
using codec::kBlockBytes;

void add_sums(Digest& digest, uint64_t block, const uint64_t sums[2]) {
  for (int k = 0; k < 2; ++k) digest.d[k] += sums[k] * block_multiplier(k, block);
}

// Rows of the image that lie within one block, or one piece of a row that does not.
void add_block(const codec::DigestKernels& kernels, Digest& digest, uint64_t block, const DigestRows& rows) {
  uint64_t sums[2] = {0, 0};
  kernels.block_rows(rows, sums);
  add_sums(digest, block, sums);
}

void add_run(const codec::DigestKernels& kernels, Digest& digest, uint64_t image_offset, const std::byte* data,
             size_t n) {
  while (n > 0) {
    const size_t offset = image_offset % kBlockBytes;
    const size_t piece = std::min(n, kBlockBytes - offset);
    add_block(kernels, digest, image_offset / kBlockBytes, {data, 0, offset, 0, piece, 1});
    image_offset += piece;
    data += piece;
    n -= piece;
  }
}

// How many rows, from one that starts at `offset` of a block, end in that block too.
size_t rows_in_block(size_t offset, uint64_t image_stride, size_t row_bytes) {
  if (offset + row_bytes > kBlockBytes) return 0;
  const uint64_t room = kBlockBytes - offset - row_bytes;
  return image_stride == 0 ? SIZE_MAX : static_cast<size_t>(room / image_stride + 1);
}

}  // namespace

std::string Digest::to_string() const {
  return fmt::format("{:016x}{:016x}", d[0], d[1]);
}

void digest_bytes(Digest& digest, uint64_t image_offset, const std::byte* data, size_t n) {
  add_run(*codec::active_kernels().digest, digest, image_offset, data, n);
}

void digest_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, const std::byte* data,
                 ptrdiff_t data_stride, size_t row_bytes, size_t rows) {
  const codec::DigestKernels& kernels = *codec::active_kernels().digest;
  if (image_stride == row_bytes && data_stride == static_cast<ptrdiff_t>(row_bytes)) {
    add_run(kernels, digest, image_offset, data, row_bytes * rows);
    return;
  }
  codec::Prefetcher ahead(data, data_stride, row_bytes, rows);
  while (rows > 0) {
    const size_t offset = image_offset % kBlockBytes;
    const size_t together = std::min(rows, rows_in_block(offset, image_stride, row_bytes));
    if (together == 0) {
      add_run(kernels, digest, image_offset, data, row_bytes);
    } else {
      add_block(kernels, digest, image_offset / kBlockBytes,
                {data, data_stride, offset, static_cast<size_t>(image_stride), row_bytes, together});
    }
    const size_t done = std::max<size_t>(together, 1);
    ahead.advance(row_bytes * done);
    image_offset += image_stride * done;
    data += data_stride * static_cast<ptrdiff_t>(done);
    rows -= done;
  }
}

void digest_copy_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, std::byte* dst,
                      ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes, size_t rows) {
  const codec::DigestKernels& kernels = *codec::active_kernels().digest;
  codec::Prefetcher ahead(src, src_stride, row_bytes, rows);
  for (; rows > 0; --rows, image_offset += image_stride, src += src_stride, dst += dst_stride) {
    for (size_t done = 0; done < row_bytes;) {
      const uint64_t at = image_offset + done;
      const size_t piece = std::min(row_bytes - done, kBlockBytes - at % kBlockBytes);
      uint64_t sums[2] = {0, 0};
      kernels.block_copy(dst + done, src + done, at % kBlockBytes, piece, ahead, sums);
      add_sums(digest, at / kBlockBytes, sums);
      done += piece;
    }
  }
}

}  // namespace tessera
