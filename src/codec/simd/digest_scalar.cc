// The reference digest of rows within a block: word by word.
#include <cstring>

#include "codec/simd/digest_tables.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

void add_word(size_t word, uint32_t value, uint64_t sums[2]) {
  for (int k = 0; k < 2; ++k) sums[k] += uint64_t{value} * kWordMultipliers[k][word];
}

void add_row(const std::byte* data, size_t offset, size_t n, uint64_t sums[2]) {
  while (n > 0) {
    const size_t skipped = offset % sizeof(uint32_t);
    const size_t count = n < sizeof(uint32_t) - skipped ? n : sizeof(uint32_t) - skipped;
    std::byte bytes[sizeof(uint32_t)] = {};
    std::memcpy(bytes + skipped, data, count);
    uint32_t value;
    std::memcpy(&value, bytes, sizeof(value));
    add_word(offset / sizeof(uint32_t), value, sums);
    data += count;
    offset += count;
    n -= count;
  }
}

void block_rows(const DigestRows& rows, Prefetcher& /*ahead*/, uint64_t sums[2]) {
  for (size_t r = 0; r < rows.rows; ++r)
    add_row(rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride, rows.offset + r * rows.image_stride,
            rows.row_bytes, sums);
}

void block_copy(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, Prefetcher& ahead, uint64_t sums[2]) {
  block_rows(rows, ahead, sums);
  for (size_t r = 0; r < rows.rows; ++r)
    std::memcpy(dst + static_cast<ptrdiff_t>(r) * dst_stride, rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride,
                rows.row_bytes);
}

}  // namespace

const DigestKernels& scalar_digest() {
  static constexpr DigestKernels kKernels{.target = "scalar", .block_rows = block_rows, .block_copy = block_copy};
  return kKernels;
}

}  // namespace tessera::codec
