// Copies that write past the caches, for destinations that are larger than the caches: no line of the destination is
// read first, and the source's lines stay cached.
#pragma once

#include <cstddef>

namespace tessera {

// Copies n bytes with non-temporal stores, of whole cache lines if possible. Either pointer may be unaligned; no
// overlap. Until stream_fence() other threads may see the bytes late. Where there are no such stores it is a plain
// copy.
void copy_stream(void* dst, const void* src, size_t n);

// copy_stream for a block of rows. It hides the latency of the next rows' first lines, so that rows of 512 B are copied
// nearly as fast as long ones. Strides are in bytes and may be negative.
void copy_stream_rows(void* dst, ptrdiff_t dst_stride, const void* src, ptrdiff_t src_stride, size_t row_bytes,
                      size_t rows);

// Orders the non-temporal stores of this thread before all its later stores: call it once, before publishing the data.
void stream_fence();

}  // namespace tessera
