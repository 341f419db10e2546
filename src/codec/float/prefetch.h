// Prefetches the lines of a block of rows ahead of their use: the CPU's own prefetchers do not follow from one short
// row to the next.
#pragma once

#include <cstddef>

namespace tessera::codec {

class Prefetcher {
 public:
  // How far to look ahead: a loop that only reads consumes a line sooner than one that also writes.
  static constexpr size_t kToCopy = 4096;
  static constexpr size_t kToRead = 8192;

  // Prefetches the first `ahead` bytes. REQUIRES: row_bytes > 0
  Prefetcher(const std::byte* data, ptrdiff_t stride, size_t row_bytes, size_t rows, size_t ahead)
      : stride_(stride),
        ahead_(ahead),
        rows_left_(rows),
        near_bytes_(row_bytes > ahead ? row_bytes - ahead : 0),
        rows_ahead_(row_bytes > ahead ? 1 : (ahead + row_bytes - 1) / row_bytes) {
    for (size_t r = 0; r < rows_ahead_ && r < rows; ++r, data += stride)
      for (size_t i = 0; i < row_bytes && i < ahead; i += kLine) __builtin_prefetch(data + i);
  }

  // Call it once for each row, before it is read.
  void begin_row(const std::byte* row) {
    here_ = row + ahead_;
    there_ = (rows_left_ > rows_ahead_ ? row + static_cast<ptrdiff_t>(rows_ahead_) * stride_ : row) - near_bytes_;
    --rows_left_;
  }
  // Call it once for each line: prefetches what is that far beyond byte `i` of the row, in this row or a later one.
  // (Not merely inline: GCC drops calls of functions without effects, and does not count a prefetch as one.)
  [[gnu::always_inline]] void step(size_t i) const { __builtin_prefetch((i < near_bytes_ ? here_ : there_) + i); }

 private:
  static constexpr size_t kLine = 64;

  ptrdiff_t stride_;
  size_t ahead_;
  size_t rows_left_;
  size_t near_bytes_;  // of a row, for which the prefetch address is in the same row
  size_t rows_ahead_;
  const std::byte* here_ = nullptr;
  const std::byte* there_ = nullptr;
};

}  // namespace tessera::codec
