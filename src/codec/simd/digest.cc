#include "codec/simd/digest.h"

#include <algorithm>

#include "base/fail.h"
#include "codec/float/prefetch.h"
#include "codec/simd/digest_tables.h"
#include "codec/simd/kernel_set.h"

namespace tessera {
namespace {

using codec::block_multiplier;
using codec::DigestRows;
using codec::kBlockBytes;
using codec::Prefetcher;

// How many rows, from one that starts at `offset` of a block, end in that block too.
size_t rows_in_block(size_t offset, uint64_t image_stride, size_t row_bytes) {
  if (offset + row_bytes > kBlockBytes) return 0;
  const uint64_t room = kBlockBytes - offset - row_bytes;
  return image_stride == 0 ? SIZE_MAX : static_cast<size_t>(room / image_stride + 1);
}

// Adds sum(DigestRows, row, skipped, sums) of all parts of `rows` that lie within one block: as many whole rows as
// end in it, from row `row` on, or what it holds of that row, behind its first `skipped` bytes. rows.offset counts from
// the image's start.
template <typename Sum>
void for_each_block(Digest& digest, const DigestRows& rows, Sum sum) {
  const auto add = [&](const DigestRows& part, size_t row, size_t skipped) {
    const uint64_t block = part.offset / kBlockBytes;
    DigestRows within = part;
    within.offset %= kBlockBytes;
    uint64_t sums[2] = {0, 0};
    sum(within, row, skipped, sums);
    for (int k = 0; k < 2; ++k) digest.d[k] += sums[k] * block_multiplier(k, block);
  };
  DigestRows part = rows;
  for (size_t row = 0; row < rows.rows; row += part.rows) {
    part.data = rows.data + static_cast<ptrdiff_t>(row) * rows.data_stride;
    part.offset = rows.offset + row * rows.image_stride;
    part.row_bytes = rows.row_bytes;
    part.rows = std::min(rows.rows - row, rows_in_block(part.offset % kBlockBytes, rows.image_stride, rows.row_bytes));
    if (part.rows > 0) {
      add(part, row, 0);
      continue;
    }
    part.rows = 1;
    for (size_t skipped = 0; skipped < rows.row_bytes; skipped += part.row_bytes) {
      part.row_bytes = std::min(rows.row_bytes - skipped, kBlockBytes - part.offset % kBlockBytes);
      add(part, row, skipped);
      part.data += part.row_bytes;
      part.offset += part.row_bytes;
    }
  }
}

}  // namespace

std::string Digest::to_string() const {
  return fmt::format("{:016x}{:016x}", d[0], d[1]);
}

void digest_bytes(Digest& digest, uint64_t image_offset, const std::byte* data, size_t n) {
  digest_rows(digest, image_offset, n, data, static_cast<ptrdiff_t>(n), n, 1);
}

void digest_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, const std::byte* data,
                 ptrdiff_t data_stride, size_t row_bytes, size_t rows) {
  if (rows > 1 && image_stride == row_bytes && data_stride == static_cast<ptrdiff_t>(row_bytes))
    return digest_bytes(digest, image_offset, data, row_bytes * rows);
  const codec::DigestKernels& kernels = *codec::active_kernels().digest;
  Prefetcher ahead(data, data_stride, row_bytes, rows);
  for_each_block(digest, {data, data_stride, image_offset, image_stride, row_bytes, rows},
                 [&](const DigestRows& part, size_t /*row*/, size_t /*skipped*/, uint64_t sums[2]) {
                   kernels.block_rows(part, ahead, sums);
                 });
}

void digest_copy_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, std::byte* dst,
                      ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes, size_t rows) {
  const codec::DigestKernels& kernels = *codec::active_kernels().digest;
  Prefetcher ahead(src, src_stride, row_bytes, rows);
  for_each_block(digest, {src, src_stride, image_offset, image_stride, row_bytes, rows},
                 [&](const DigestRows& part, size_t row, size_t skipped, uint64_t sums[2]) {
                   std::byte* const to = dst + static_cast<ptrdiff_t>(row) * dst_stride + skipped;
                   kernels.block_copy(part, to, dst_stride, ahead, sums);
                 });
}

}  // namespace tessera
