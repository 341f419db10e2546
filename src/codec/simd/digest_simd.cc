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

// Sums of products for k = 0 and 1. (They are members since GCC keeps arrays of vectors in memory.)
struct Sums {
  V64 of_0;
  V64 of_1;
};

HWY_INLINE Sums no_sums() {
  return {hn::Zero(D64()), hn::Zero(D64())};
}

HWY_INLINE V32 odd_to_even(V32 v) {
  return hn::BitCast(D32(), hn::ShiftRight<32>(hn::BitCast(D64(), v)));
}

// Keeps the compiler from loading a vector again for each of its uses. While the line is on its way from memory, every
// such load occupies a slot of the processor's load buffer, which has too few of them.
HWY_INLINE void keep_loaded([[maybe_unused]] V32& v) {
#if HWY_ARCH_X86 && !HWY_COMPILER_MSVC
  asm("" : "+v"(v.raw));
#endif
}

HWY_INLINE void add_products(V32 words, V32 odd_words, const uint32_t* multipliers, V64& sum) {
  V32 m = hn::LoadU(D32(), multipliers);
  keep_loaded(m);
  sum = hn::Add(sum, hn::Add(hn::MulEven(words, m), hn::MulEven(odd_words, odd_to_even(m))));
}

HWY_INLINE void add_words(V32 words, size_t first, Sums& sums) {
  const V32 odd_words = odd_to_even(words);
  add_products(words, odd_words, kWordMultipliers[0].data() + first, sums.of_0);
  add_products(words, odd_words, kWordMultipliers[1].data() + first, sums.of_1);
}

HWY_INLINE V32 load_words(const std::byte* data) {
  V32 words = hn::LoadU(D32(), reinterpret_cast<const uint32_t*>(data));
  keep_loaded(words);
  return words;
}

// Multiplies each lane, mod 2^64.
HWY_INLINE V64 multiply(V64 lanes, uint64_t factor) {
  const V32 low = hn::BitCast(D32(), lanes);
  const V32 factor_low = hn::Set(D32(), static_cast<uint32_t>(factor));
  const V32 factor_high = hn::Set(D32(), static_cast<uint32_t>(factor >> 32));
  const V64 cross = hn::Add(hn::MulEven(odd_to_even(low), factor_low), hn::MulEven(low, factor_high));
  return hn::Add(hn::MulEven(low, factor_low), hn::ShiftLeft<32>(cross));
}

// Replaces SumOfLanes(), which adds signed numbers with g++ 12 for AVX-512; these must not overflow.
HWY_INLINE uint64_t sum_of_lanes(V64 vector) {
  HWY_ALIGN uint64_t lanes[hn::MaxLanes(D64())];
  hn::Store(vector, D64(), lanes);
  uint64_t sum = 0;
  for (size_t i = 0; i < hn::Lanes(D64()); ++i) sum += lanes[i];
  return sum;
}

// The sums over whole blocks stay in vectors, too.
struct Totals {
  Sums all;
  Sums of_block;
  uint64_t block;
};

HWY_INLINE void end_block(Totals& totals) {
  totals.all.of_0 = hn::Add(totals.all.of_0, multiply(totals.of_block.of_0, block_multiplier(0, totals.block)));
  totals.all.of_1 = hn::Add(totals.all.of_1, multiply(totals.of_block.of_1, block_multiplier(1, totals.block)));
  totals.of_block = no_sums();
}

// Begins the block of byte `image`, which comes next, unless that has begun.
HWY_INLINE void begin_block(uint64_t image, Totals& totals) {
  if (image / kBlockBytes == totals.block) return;
  end_block(totals);
  totals.block = image / kBlockBytes;
}

// A row. Its first byte is byte `image` of the image.
struct ImageRow {
  const std::byte* data;
  size_t bytes;
  uint64_t image;
};

// Adds bytes [from, to) of a row, less than a vector, within one block. It loads a vector of the row and zeroes the
// other words in it, whose multipliers then do not matter. It prefers a vector that ends with these bytes: blocks often
// begin at pages, and loads across two pages are slow.
HWY_INLINE void add_part(const ImageRow& row, size_t from, size_t to, Sums& sums) {
  const size_t offset = (row.image + from) % kBlockBytes;
  const size_t word = offset / sizeof(uint32_t);
  const size_t lanes = hn::Lanes(D32());
  const size_t vector = lanes * sizeof(uint32_t);
  const size_t words = (to - from) / sizeof(uint32_t);
  if ((offset | (to - from)) % sizeof(uint32_t) == 0) {
    if (to >= vector && word + words >= lanes) {
      const V32 last = load_words(row.data + to - vector);
      return add_words(hn::IfThenZeroElse(hn::FirstN(D32(), lanes - words), last), word + words - lanes, sums);
    }
    if (from + vector <= row.bytes)
      return add_words(hn::IfThenElseZero(hn::FirstN(D32(), words), load_words(row.data + from)), word, sums);
  }
  HWY_ALIGN std::byte bytes[sizeof(uint32_t) * (hn::MaxLanes(D32()) + 1)] = {};
  std::memcpy(bytes + offset % sizeof(uint32_t), row.data + from, to - from);
  add_words(load_words(bytes), word, sums);
}

// Adds bytes [from, to) of a row, within one block.
HWY_INLINE void add_piece(const ImageRow& row, size_t from, size_t to, const Prefetcher& ahead, Sums& sums) {
  const size_t head = std::min(to - from, static_cast<size_t>((0 - row.image - from) % sizeof(uint32_t)));
  if (head != 0) add_part(row, from, from + head, sums);
  size_t at = from + head;
  const size_t lanes = hn::Lanes(D32());
  const size_t step = lanes * sizeof(uint32_t);
  size_t word = (row.image + at) % kBlockBytes / sizeof(uint32_t);
  for (; at + kLine <= to; at += kLine) {
    ahead.step(at);
    for (size_t i = 0; i < kLine; i += step, word += lanes) add_words(load_words(row.data + at + i), word, sums);
  }
  if (at == to) return;
  ahead.step(at);
  for (; at + step <= to; at += step, word += lanes) add_words(load_words(row.data + at), word, sums);
  if (at < to) add_part(row, at, to, sums);
}

// Adds bytes [from, to) of a row.
HWY_INLINE void add_bytes(const ImageRow& row, size_t from, size_t to, const Prefetcher& ahead, Totals& totals) {
  while (from < to) {
    const uint64_t image = row.image + from;
    begin_block(image, totals);
    const size_t end = std::min<size_t>(to, from + kBlockBytes - image % kBlockBytes);
    add_piece(row, from, end, ahead, totals.of_block);
    from = end;
  }
}

// Shifts a sequence of vectors to the places where vectors of the destination begin. Loads across two lines would
// occupy twice as many slots of the load buffer.
class Shift {
 public:
  // Shifts up by `bytes`, which are whole words and less than a vector.
  explicit Shift(size_t bytes) {
    const D32 d;
    const size_t words = bytes / sizeof(uint32_t);
    const auto rotated = hn::Iota(d, static_cast<uint32_t>(hn::Lanes(d) - words));
    lanes_ = hn::IndicesFromVec(d, hn::And(rotated, hn::Set(d, static_cast<uint32_t>(hn::Lanes(d) - 1))));
    low_ = hn::FirstN(d, words);
  }

  V32 rotate(V32 words) const { return hn::TableLookupLanes(words, lanes_); }
  // From two consecutive vectors, both rotated: the destination's vector at the place of the second one.
  V32 join(V32 before, V32 now) const { return hn::IfThenElse(low_, before, now); }

 private:
  decltype(hn::IndicesFromVec(D32(), hn::Zero(D32()))) lanes_;
  hn::Mask<D32> low_;
};

// Streams one line of words to where vectors begin in the destination. `before` is the previous vector, rotated.
HWY_INLINE void copy_line(const std::byte* HWY_RESTRICT src, std::byte* HWY_RESTRICT dst, size_t word,
                          const Shift& shift, V32& before, Sums& sums) {
  const size_t lanes = hn::Lanes(D32());
  for (size_t i = 0; i < kLine; i += lanes * sizeof(uint32_t), word += lanes) {
    const V32 words = load_words(src + i);
    const V32 rotated = shift.rotate(words);
    hn::Stream(shift.join(before, rotated), D32(), reinterpret_cast<uint32_t*>(dst + i));
    before = rotated;
    add_words(words, word, sums);
  }
}

// Reads whole lines of the image, which are whole words of one block, and writes whole vectors of dst.
HWY_INLINE void copy_row(const ImageRow& row, std::byte* HWY_RESTRICT dst, const Prefetcher& ahead, Totals& totals) {
  const size_t step = hn::Lanes(D32()) * sizeof(uint32_t);
  size_t at = static_cast<size_t>((0 - row.image) % kLine) + kLine;
  const size_t behind =
      reinterpret_cast<uintptr_t>(dst + at) % step;  // how far dst lags when the row is read up to a line
  if (row.bytes < at + kLine || behind % sizeof(uint32_t) != 0) {
    add_bytes(row, 0, row.bytes, ahead, totals);
    return stream_bytes(dst, row.data, row.bytes);
  }
  add_bytes(row, 0, at, ahead, totals);
  stream_bytes(dst, row.data, at - behind);
  const Shift shift(behind);
  V32 before = shift.rotate(load_words(row.data + at - step));
  while (at + kLine <= row.bytes) {
    begin_block(row.image + at, totals);
    const size_t offset = (row.image + at) % kBlockBytes;
    const size_t end = std::min(row.bytes, at + kBlockBytes - offset);
    for (size_t word = offset / sizeof(uint32_t); at + kLine <= end; at += kLine, word += kLine / sizeof(uint32_t)) {
      ahead.step(at);
      copy_line(row.data + at, dst + at - behind, word, shift, before, totals.of_block);
    }
  }
  add_bytes(row, at, row.bytes, ahead, totals);
  at -= behind;
  stream_bytes(dst + at, row.data + at, row.bytes - at);
}

template <bool kCopies>
HWY_INLINE void add_rows(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, uint64_t sums[2]) {
  Prefetcher ahead(rows.data, rows.data_stride, rows.row_bytes, rows.rows,
                   kCopies ? Prefetcher::kToCopy : Prefetcher::kToRead);
  Totals totals{no_sums(), no_sums(), rows.offset / kBlockBytes};
  ImageRow row{rows.data, rows.row_bytes, rows.offset};
  for (size_t r = 0; r < rows.rows; ++r, row.data += rows.data_stride, row.image += rows.image_stride) {
    ahead.begin_row(row.data);
    if constexpr (kCopies) {
      copy_row(row, dst, ahead, totals);
      dst += dst_stride;
    } else {
      add_bytes(row, 0, row.bytes, ahead, totals);
    }
  }
  end_block(totals);
  sums[0] += sum_of_lanes(totals.all.of_0);
  sums[1] += sum_of_lanes(totals.all.of_1);
}

void digest_rows(const DigestRows& rows, uint64_t sums[2]) {
  add_rows<false>(rows, nullptr, 0, sums);
}

void digest_copy_rows(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, uint64_t sums[2]) {
  add_rows<true>(rows, dst, dst_stride, sums);
}

const DigestKernels& digest_kernels() {
  static const DigestKernels kernels{
      .target = hwy::TargetName(HWY_TARGET), .rows = digest_rows, .copy_rows = digest_copy_rows};
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
