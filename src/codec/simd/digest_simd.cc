#include <algorithm>
#include <cstring>

#include "codec/float/prefetch.h"
#include "codec/simd/digest_tables.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/digest_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/simd/simd_target.h"
#include "codec/simd/stream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET
namespace hn = hwy::HWY_NAMESPACE;

using D32 = hn::CappedTag<uint32_t, kLine / sizeof(uint32_t)>;
using D64 = hn::RepartitionToWide<D32>;
using V32 = hn::Vec<D32>;
using V64 = hn::Vec<D64>;

// For one k: sums over the even words, the odd ones, and parts of words. (Members, not arrays over k: GCC keeps arrays
// of vectors in memory.)
struct Sum {
  V64 even;
  V64 odd;
  uint64_t part;
};
struct Sums {
  Sum of_0;
  Sum of_1;
};

HWY_INLINE V32 odd_to_even(V32 v) {
  return hn::BitCast(D32(), hn::ShiftRight<32>(hn::BitCast(D64(), v)));
}

HWY_INLINE void add_products(V32 words, V32 odd_words, const uint32_t* multipliers, Sum& sum) {
  sum.even = hn::Add(sum.even, hn::MulEven(words, hn::LoadU(D32(), multipliers)));
  sum.odd = hn::Add(sum.odd, hn::MulEven(odd_words, hn::LoadU(D32(), multipliers + 1)));
}

HWY_INLINE void add_words(V32 words, size_t first, Sums& sums) {
  const V32 odd_words = odd_to_even(words);
  add_products(words, odd_words, kWordMultipliers[0].data() + first, sums.of_0);
  add_products(words, odd_words, kWordMultipliers[1].data() + first, sums.of_1);
}

// The bytes of a word from its byte `offset % 4` on.
HWY_INLINE void add_part_of_word(const std::byte* data, size_t offset, size_t n, Sums& sums) {
  std::byte bytes[sizeof(uint32_t)] = {};
  std::memcpy(bytes + offset % sizeof(bytes), data, n);
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  sums.of_0.part += uint64_t{word} * kWordMultipliers[0][offset / sizeof(bytes)];
  sums.of_1.part += uint64_t{word} * kWordMultipliers[1][offset / sizeof(bytes)];
}

HWY_INLINE void add_row(const std::byte* data, size_t offset, size_t n, Prefetcher& ahead, Sums& sums) {
  const size_t head = std::min(n, (0 - offset) % sizeof(uint32_t));
  if (head != 0) {
    add_part_of_word(data, offset, head, sums);
    data += head;
    offset += head;
    n -= head;
  }
  const size_t lanes = hn::Lanes(D32());
  const size_t step = lanes * sizeof(uint32_t);
  size_t word = offset / sizeof(uint32_t);
  for (; n >= kLine; n -= kLine) {
    ahead.step();
    for (size_t i = 0; i < kLine; i += step, data += step, word += lanes)
      add_words(hn::LoadU(D32(), reinterpret_cast<const uint32_t*>(data)), word, sums);
  }
  if (head + n != 0) ahead.step();
  for (; n >= step; n -= step, data += step, word += lanes)
    add_words(hn::LoadU(D32(), reinterpret_cast<const uint32_t*>(data)), word, sums);
  if (n != 0) {  // zeros do not count, so neither do the multipliers behind the last
    HWY_ALIGN uint32_t last[hn::MaxLanes(D32())] = {};
    std::memcpy(last, data, n);
    add_words(hn::Load(D32(), last), word, sums);
  }
}

// One line of words, streamed to an aligned destination.
HWY_INLINE void add_line(const std::byte* HWY_RESTRICT src, std::byte* HWY_RESTRICT dst, size_t word, Sums& sums) {
  const auto* in = reinterpret_cast<const uint32_t*>(src);
  auto* out = reinterpret_cast<uint32_t*>(dst);
  for (size_t i = 0; i < kLine / sizeof(uint32_t); i += hn::Lanes(D32())) {
    const V32 words = hn::LoadU(D32(), in + i);
    hn::Stream(words, D32(), out + i);
    add_words(words, word + i, sums);
  }
}

HWY_INLINE Sums no_sums() {
  const V64 zero = hn::Zero(D64());
  return {{zero, zero, 0}, {zero, zero, 0}};
}

// Not SumOfLanes(): g++ 12's for AVX-512 adds signed numbers, which must not overflow.
HWY_INLINE uint64_t total(const Sum& sum) {
  HWY_ALIGN uint64_t lanes[hn::MaxLanes(D64())];
  hn::Store(hn::Add(sum.even, sum.odd), D64(), lanes);
  uint64_t all = sum.part;
  for (size_t i = 0; i < hn::Lanes(D64()); ++i) all += lanes[i];
  return all;
}

HWY_INLINE void add_up(const Sums& vectors, uint64_t sums[2]) {
  sums[0] += total(vectors.of_0);
  sums[1] += total(vectors.of_1);
}

void block_rows(const DigestRows& rows, Prefetcher& ahead, uint64_t sums[2]) {
  Sums vectors = no_sums();
  for (size_t r = 0; r < rows.rows; ++r)
    add_row(rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride, rows.offset + r * rows.image_stride,
            rows.row_bytes, ahead, vectors);
  add_up(vectors, sums);
}

HWY_INLINE void copy_row(std::byte* HWY_RESTRICT dst, const std::byte* HWY_RESTRICT src, size_t offset, size_t n,
                         Prefetcher& ahead, Sums& sums) {
  const size_t head = to_line(dst);
  size_t done = 0;
  if (head + kLine <= n && (offset + head) % sizeof(uint32_t) == 0) {  // lines of dst begin where words do
    if (head != 0) add_row(src, offset, head, ahead, sums);
    std::memcpy(dst, src, head);
    for (done = head; done + kLine <= n; done += kLine) {
      ahead.step();
      add_line(src + done, dst + done, (offset + done) / sizeof(uint32_t), sums);
    }
  }
  if (done < n) {
    add_row(src + done, offset + done, n - done, ahead, sums);
    stream_bytes(dst + done, src + done, n - done);
  }
}

void block_copy(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, Prefetcher& ahead, uint64_t sums[2]) {
  Sums vectors = no_sums();
  for (size_t r = 0; r < rows.rows; ++r)
    copy_row(dst + static_cast<ptrdiff_t>(r) * dst_stride, rows.data + static_cast<ptrdiff_t>(r) * rows.data_stride,
             rows.offset + r * rows.image_stride, rows.row_bytes, ahead, vectors);
  add_up(vectors, sums);
}

const DigestKernels& digest_kernels() {
  static const DigestKernels kernels{
      .target = hwy::TargetName(HWY_TARGET), .block_rows = block_rows, .block_copy = block_copy};
  return kernels;
}

#else
const DigestKernels& digest_kernels() {
  return scalar_digest();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(digest_kernels);
const DigestKernels& simd_digest(int64_t target) {
  return TESSERA_CALL_TARGET(digest_kernels, target);
}

}  // namespace tessera::codec
#endif
