#include "codec/float/prefetch.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/stream_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/simd/simd_target.h"
#include "codec/simd/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {

#if TESSERA_SIMD_TARGET

HWY_INLINE void copy_row(std::byte* HWY_RESTRICT dst, const std::byte* HWY_RESTRICT src, size_t n,
                         const Prefetcher& ahead) {
  const size_t head = to_line(dst);
  if (n < head + kLine) {
    for (size_t i = 0; i < n; i += kLine) ahead.step(i);
    return stream_part(dst, src, n);
  }
  if (head != 0) {
    ahead.step(0);
    stream_part(dst, src, head);
  }
  size_t i = head;
  for (; i + kLine <= n; i += kLine) {
    ahead.step(i);
    stream_line(dst + i, src + i);
  }
  if (i < n) stream_part(dst + i, src + i, n - i);
}

void copy_rows(std::byte* dst, ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes,
               size_t rows) {
  Prefetcher ahead(src, src_stride, row_bytes, rows, Prefetcher::kToCopy);
  for (size_t row = 0; row < rows; ++row, dst += dst_stride, src += src_stride) {
    ahead.begin_row(src);
    copy_row(dst, src, row_bytes, ahead);
  }
}

const StreamKernels& stream_kernels() {
  static const StreamKernels kernels{.target = hwy::TargetName(HWY_TARGET), .copy_rows = copy_rows};
  return kernels;
}

#else
const StreamKernels& stream_kernels() {
  return scalar_stream();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(stream_kernels);
const StreamKernels& simd_stream(int64_t target) {
  return TESSERA_CALL_TARGET(stream_kernels, target);
}

}  // namespace tessera::codec
#endif
