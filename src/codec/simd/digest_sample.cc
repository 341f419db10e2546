#include "codec/simd/digest_sample.h"

#include <algorithm>

#include "codec/simd/digest_tables.h"

namespace tessera {
namespace {

constexpr uint64_t kSampledBytes = 16 << 10;  // of a block: a jump costs as much as reading some KiB
constexpr uint64_t kGroupBytes = DigestSample::kOneIn * kSampledBytes;
constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kStepBytes = 2048;  // that are digested, and asked for, in turn
constexpr uint64_t kAhead = 2;         // groups

struct ImageRows {
  uint64_t image_offset;
  uint64_t image_stride;
  const std::byte* data;
  ptrdiff_t data_stride;
  size_t row_bytes;
  size_t rows;

  uint64_t begin(size_t row) const { return image_offset + row * image_stride; }
  uint64_t end(size_t row) const { return begin(row) + row_bytes; }
  const std::byte* at(size_t row) const { return data + static_cast<ptrdiff_t>(row) * data_stride; }
};

// Asks for what lies in [begin, end) of the image.
void prefetch(const ImageRows& rows, uint64_t begin, uint64_t end) {
  const size_t first = begin <= rows.image_offset ? 0 : (begin - rows.image_offset) / rows.image_stride;
  for (size_t row = first; row < rows.rows && rows.begin(row) < end; ++row) {
    const uint64_t from = std::max(begin, rows.begin(row)), to = std::min(end, rows.end(row));
    for (uint64_t at = from; at < to; at += kLineBytes) __builtin_prefetch(rows.at(row) + (at - rows.begin(row)), 0, 2);
  }
}

// What lies in [begin, end) of the image of one row.
void add_part(Digest& digest, const ImageRows& rows, size_t row, uint64_t begin, uint64_t end) {
  const uint64_t from = std::max(begin, rows.begin(row)), to = std::min(end, rows.end(row));
  if (from < to) digest_bytes(digest, from, rows.at(row) + (from - rows.begin(row)), static_cast<size_t>(to - from));
}

// What lies in [begin, end) of the image of all. REQUIRES: they begin at the distance of the stride, which is their
// length at least
void add_block(Digest& digest, const ImageRows& rows, uint64_t begin, uint64_t end) {
  const uint64_t stride = rows.image_stride;
  const auto rows_below = [&](uint64_t place) {  // that begin below it
    return place <= rows.image_offset ? 0
                                      : std::min<size_t>(rows.rows, (place - rows.image_offset + stride - 1) / stride);
  };
  size_t first = rows_below(begin), last = rows_below(end);
  if (first > 0) add_part(digest, rows, first - 1, begin, end);
  if (first < last && rows.end(last - 1) > end) add_part(digest, rows, --last, begin, end);
  if (first < last)
    digest_rows(digest, rows.begin(first), stride, rows.at(first), rows.data_stride, rows.row_bytes, last - first);
}

}  // namespace

SampleSeed seed_of_version(const SampleSeed& session, int64_t version) {
  if (!session) return std::nullopt;
  return codec::splitmix64(*session, static_cast<uint64_t>(version));
}

DigestSample::DigestSample(uint64_t version_seed, uint32_t tensor) : seed_(codec::splitmix64(version_seed, tensor)) {}

uint64_t DigestSample::block(uint64_t group) const {
  return kOneIn * group + codec::splitmix64(seed_, group) % kOneIn;
}

bool DigestSample::touches(uint64_t begin, uint64_t end) const {
  if (end <= begin) return false;
  if (end - begin >= 2 * kGroupBytes) return true;  // a whole group lies in between
  for (uint64_t group = begin / kGroupBytes; group * kGroupBytes < end; ++group) {
    const uint64_t chosen = block(group) * kSampledBytes;
    if (chosen < end && begin < chosen + kSampledBytes) return true;
  }
  return false;
}

void digest_sampled_rows(Digest& digest, const DigestSample& sample, uint64_t image_offset, uint64_t image_stride,
                         const std::byte* data, ptrdiff_t data_stride, size_t row_bytes, size_t rows) {
  if (rows == 0 || row_bytes == 0) return;
  if (rows == 1 || (image_stride == row_bytes && data_stride == static_cast<ptrdiff_t>(row_bytes))) {
    row_bytes *= rows;
    rows = 1;
    image_stride = row_bytes;
  } else if (image_stride > kGroupBytes) {
    for (size_t row = 0; row < rows; ++row)
      digest_sampled_rows(digest, sample, image_offset + row * image_stride, row_bytes,
                          data + static_cast<ptrdiff_t>(row) * data_stride, data_stride, row_bytes, 1);
    return;
  }
  const ImageRows all{image_offset, image_stride, data, data_stride, row_bytes, rows};
  const uint64_t end = all.end(rows - 1);
  // The processor's prefetchers do not know which block comes next: it is asked for while others are digested.
  for (uint64_t group = image_offset / kGroupBytes; group * kGroupBytes < end; ++group) {
    const uint64_t begin = sample.block(group) * kSampledBytes, ahead = sample.block(group + kAhead) * kSampledBytes;
    const bool inside = begin + kSampledBytes > image_offset && begin < end;
    for (uint64_t at = 0; at < kSampledBytes && (inside || ahead < end); at += kStepBytes) {
      if (ahead < end) prefetch(all, ahead + at, ahead + at + kStepBytes);
      if (inside) add_block(digest, all, begin + at, begin + at + kStepBytes);
    }
  }
}

}  // namespace tessera
