// The digest of a tensor's logical contents: docs/formats/digest.md. It does not depend on the layout: digests of any
// disjoint parts that cover the tensor's row-major image add up to the tensor's, even where a cut falls inside a word.
//
// Thread-compatible; functions never throw and allocate nothing. Data may be unaligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

struct Digest {
  uint64_t d[2] = {0, 0};
  uint64_t elements = 0;  // counted by the caller

  Digest& operator+=(const Digest& other) {
    d[0] += other.d[0];
    d[1] += other.d[1];
    elements += other.elements;
    return *this;
  }
  friend Digest operator+(Digest a, const Digest& b) { return a += b; }
  bool operator==(const Digest&) const = default;
  std::string to_string() const;  // 32 hex digits, d[0] first
};

// Adds `n` bytes that begin at byte `image_offset` of the image.
void digest_bytes(Digest& digest, uint64_t image_offset, const std::byte* data, size_t n);

// Adds `rows` rows of `row_bytes` each: row r begins at byte image_offset + r * image_stride of the image and at data +
// r * data_stride in memory. Made for short rows: a byte in rows of 512 B or less costs little more than in long ones.
void digest_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, const std::byte* data,
                 ptrdiff_t data_stride, size_t row_bytes, size_t rows);

// digest_rows() of the source and copy_stream_rows() to `dst` in one pass over memory. A receiver that reads mapped
// memory without a cast should use it. The caller must call stream_fence(). (With a cast, use digest_rows() and
// cast_row_stream() in turn on pieces that fit the first-level cache.)
void digest_copy_rows(Digest& digest, uint64_t image_offset, uint64_t image_stride, std::byte* dst,
                      ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes, size_t rows);

}  // namespace tessera
