// The reference digest: word by word.
#include <cstring>

#include "codec/simd/digest_tables.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

// Adds bytes within one block.
void add_piece(const std::byte* data, size_t offset, size_t n, uint64_t sums[2]) {
  while (n > 0) {
    const size_t skipped = offset % sizeof(uint32_t);
    const size_t count = n < sizeof(uint32_t) - skipped ? n : sizeof(uint32_t) - skipped;
    std::byte bytes[sizeof(uint32_t)] = {};
    std::memcpy(bytes + skipped, data, count);
    uint32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    for (int k = 0; k < 2; ++k) sums[k] += uint64_t{word} * kWordMultipliers[k][offset / sizeof(uint32_t)];
    data += count;
    offset += count;
    n -= count;
  }
}

void add_row(const std::byte* data, uint64_t at, size_t n, uint64_t sums[2]) {
  while (n > 0) {
    const size_t offset = at % kBlockBytes;
    const size_t piece = n < kBlockBytes - offset ? n : kBlockBytes - offset;
    uint64_t of_block[2] = {0, 0};
    add_piece(data, offset, piece, of_block);
    for (int k = 0; k < 2; ++k) sums[k] += of_block[k] * block_multiplier(k, at / kBlockBytes);
    data += piece;
    at += piece;
    n -= piece;
  }
}

void add_rows(const DigestRows& rows, uint64_t sums[2]) {
  for (size_t r = 0; r < rows.rows; ++r)
    add_row(rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride, rows.offset + r * rows.image_stride,
            rows.row_bytes, sums);
}

void copy_rows(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, uint64_t sums[2]) {
  add_rows(rows, sums);
  for (size_t r = 0; r < rows.rows; ++r)
    std::memcpy(dst + static_cast<ptrdiff_t>(r) * dst_stride, rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride,
                rows.row_bytes);
}

}  // namespace

const DigestKernels& scalar_digest() {
  static constexpr DigestKernels kKernels{.target = "scalar", .rows = add_rows, .copy_rows = copy_rows};
  return kKernels;
}

}  // namespace tessera::codec
