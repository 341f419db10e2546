// Walks over the lines of a block of rows, ahead of who reads them, and prefetches each: the processor's own
// prefetchers do not see from one short row to the next.
#pragma once

#include <cstddef>

namespace tessera::codec {

class Prefetcher {
 public:
  Prefetcher(const std::byte* data, ptrdiff_t stride, size_t row_bytes, size_t rows)
      : row_(data), stride_(stride), row_bytes_(row_bytes), rows_left_(rows) {
    advance(kAhead);
  }

  // One line further.
  void step() {
    if (offset_ >= row_bytes_) {
      if (rows_left_ <= 1) return;
      --rows_left_;
      row_ += stride_;
      offset_ = 0;
    }
    __builtin_prefetch(row_ + offset_);
    offset_ += kLine;
  }
  void advance(size_t bytes) {
    for (size_t i = 0; i < bytes; i += kLine) step();
  }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kAhead = 4096;

  const std::byte* row_;
  ptrdiff_t stride_;
  size_t row_bytes_;
  size_t rows_left_;
  size_t offset_ = 0;
};

}  // namespace tessera::codec
