// Non-temporal copies for one Highway target, for kernels that end with one.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(TESSERA_CODEC_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_CODEC_STREAM_INL_H_
#undef TESSERA_CODEC_STREAM_INL_H_
#else
#define TESSERA_CODEC_STREAM_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {

inline constexpr size_t kLine = 64;

// Bytes from p to the next line.
HWY_INLINE size_t to_line(const std::byte* p) {
  return (0 - reinterpret_cast<uintptr_t>(p)) % kLine;
}

// Copies one line to an aligned destination.
HWY_INLINE void stream_line(std::byte* HWY_RESTRICT dst, const std::byte* HWY_RESTRICT src) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<uint8_t, kLine> d;
  const auto* in = reinterpret_cast<const uint8_t*>(src);
  auto* out = reinterpret_cast<uint8_t*>(dst);
  for (size_t i = 0; i < kLine; i += hn::Lanes(d)) hn::Stream(hn::LoadU(d, in + i), d, out + i);
}

// Copies part of a line. It is streamed if possible: the rest of the line then joins it on the way to memory, while a
// line that is written through the cache is read first.
HWY_INLINE void stream_part(std::byte* HWY_RESTRICT dst, const std::byte* HWY_RESTRICT src, size_t n) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<uint8_t, 16> d;
  if ((reinterpret_cast<uintptr_t>(dst) | n) % hn::Lanes(d) != 0) {
    std::memcpy(dst, src, n);
    return;
  }
  for (size_t i = 0; i < n; i += hn::Lanes(d))
    hn::Stream(hn::LoadU(d, reinterpret_cast<const uint8_t*>(src + i)), d, reinterpret_cast<uint8_t*>(dst + i));
}

// The source must already be in the cache.
HWY_INLINE void stream_bytes(std::byte* HWY_RESTRICT dst, const std::byte* HWY_RESTRICT src, size_t n) {
  const size_t head = to_line(dst);
  if (n < head + kLine) return stream_part(dst, src, n);
  stream_part(dst, src, head);
  size_t i = head;
  for (; i + kLine <= n; i += kLine) stream_line(dst + i, src + i);
  stream_part(dst + i, src + i, n - i);
}

}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
