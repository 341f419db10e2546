#include "codec/simd/digest.h"

#include <gtest/gtest.h>

#include "codec/codec_testing.h"
#include "codec/simd/stream.h"

namespace tessera {
namespace {

// The definition of docs/formats/digest.md, byte by byte, with a stateful generator.
class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9ULL;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebULL;
    return z ^ z >> 31;
  }

 private:
  uint64_t state_;
};

std::vector<uint64_t> outputs(const char* seed, size_t count) {
  uint64_t start = 0;
  for (const char* c = seed; *c != 0; ++c) start = start << 8 | static_cast<unsigned char>(*c);
  SplitMix generator(start);
  std::vector<uint64_t> values(count);
  for (uint64_t& value : values) value = generator.next();
  return values;
}

Digest slow_digest(uint64_t image_offset, const std::byte* data, size_t n) {
  static const std::vector<uint64_t> word[2] = {outputs("TESSERA0", 1024), outputs("TESSERA1", 1024)};
  static const std::vector<uint64_t> block[2] = {outputs("TESSERA2", 4096), outputs("TESSERA3", 4096)};
  Digest digest;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t at = image_offset + i;
    const uint64_t in_word = std::to_integer<uint64_t>(data[i]) << 8 * (at % 4);
    for (int k = 0; k < 2; ++k) digest.d[k] += in_word * (word[k][at / 4 % 1024] >> 32 | 1) * (block[k][at / 4096] | 1);
  }
  return digest;
}

Digest digest_of(uint64_t image_offset, const std::byte* data, size_t n) {
  Digest digest;
  digest_bytes(digest, image_offset, data, n);
  return digest;
}

class DigestTest : public EveryKernelTest {};

TEST_P(DigestTest, GoldenValues) {
  std::vector<std::byte> counting(10'000);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i * 7 + i / 256);
  EXPECT_EQ(Digest().to_string(), "00000000000000000000000000000000");
  const std::byte one[] = {std::byte{1}};
  EXPECT_EQ(digest_of(0, one, 1).to_string(), "20d57761ea867eef4737f1a2f1580693");
  EXPECT_EQ(digest_of(0, counting.data(), 4096).to_string(), "ca1c1f819b6d89ba5c45505a02d04f14");
  EXPECT_EQ(digest_of(0, counting.data(), 10'000).to_string(), "99a369a99c60f4786997b10208667586");
  EXPECT_EQ(digest_of((uint64_t{1} << 40) + 3, counting.data(), 1000).to_string(), "0edabdd2bcc734225290209d3929f918");
}

TEST_P(DigestTest, IsTheDefinitionAtAnyOffsetLengthAndAlignment) {
  const auto random = random_bytes(3 * 4096, 1);
  std::vector<size_t> lengths(150);
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = n;
  lengths.insert(lengths.end(), {4095, 4096, 4097, 9001});
  for (const size_t n : lengths) {
    for (const uint64_t offset : {0, 1, 2, 3, 4, 31, 4000, 4093, 8192, 12'345}) {
      GuardedBytes data(n, (n + offset) % 37);
      std::copy_n(random.data(), n, data.data());
      ASSERT_EQ(digest_of(offset, data.data(), n), slow_digest(offset, data.data(), n)) << n << " bytes at " << offset;
    }
  }
}

TEST_P(DigestTest, AnyCutAddsUpEvenInsideAWord) {
  const auto image = random_bytes(20'000, 2);
  const Digest whole = digest_of(0, image.data(), image.size());
  std::mt19937 random(3);
  for (int round = 0; round < 50; ++round) {
    Digest sum;
    for (size_t begin = 0; begin < image.size();) {
      const size_t n = std::min<size_t>(image.size() - begin, random() % (round % 2 == 0 ? 9000 : 70));
      sum += digest_of(begin, image.data() + begin, n);
      begin += n;
    }
    ASSERT_EQ(sum, whole) << "round " << round;
  }
}

// Columns of a matrix, read from the matrix or from contiguous copies: both add up to the same digest.
TEST_P(DigestTest, DoesNotDependOnTheLayout) {
  struct Case {
    size_t rows;
    size_t row_bytes;
    size_t cuts;
  };
  for (const auto& [rows, row_bytes, cuts] : {Case{40, 1024, 2}, Case{9, 16'384, 4}, Case{300, 22, 2}, Case{64, 512, 3},
                                              Case{21, 4090, 2}, Case{500, 7, 7}}) {
    const auto image = random_bytes(rows * row_bytes, 4);
    const Digest whole = slow_digest(0, image.data(), image.size());
    Digest strided;
    Digest packed;
    Digest copied;
    std::vector<std::byte> assembled(image.size());
    for (size_t c = 0; c < cuts; ++c) {
      const size_t begin = row_bytes * c / cuts;
      const size_t width = row_bytes * (c + 1) / cuts - begin;
      digest_rows(strided, begin, row_bytes, image.data() + begin, static_cast<ptrdiff_t>(row_bytes), width, rows);
      std::vector<std::byte> part;
      for (size_t r = 0; r < rows; ++r) {
        const std::byte* row = image.data() + r * row_bytes + begin;
        part.insert(part.end(), row, row + width);
      }
      const auto part_stride = static_cast<ptrdiff_t>(width);
      digest_rows(packed, begin, row_bytes, part.data(), part_stride, width, rows);
      digest_copy_rows(copied, begin, row_bytes, assembled.data() + begin, static_cast<ptrdiff_t>(row_bytes),
                       part.data(), part_stride, width, rows);
    }
    stream_fence();
    EXPECT_EQ(strided, whole) << rows << " rows of " << row_bytes;
    EXPECT_EQ(packed, whole) << rows << " rows of " << row_bytes;
    EXPECT_EQ(copied, whole) << rows << " rows of " << row_bytes;
    EXPECT_EQ(assembled, image) << rows << " rows of " << row_bytes;
  }
}

// Destinations at any place in a line and in a block. The rows there are contiguous, or have gaps between them.
TEST_P(DigestTest, CopiesRowsToAnyAlignment) {
  struct Case {
    size_t rows;
    size_t row_bytes;
    size_t gap;  // between rows of the destination
  };
  for (const auto& [rows, row_bytes, gap] :
       {Case{1, 9001, 0}, Case{5, 512, 0}, Case{5, 512, 1536}, Case{3, 4096, 0}, Case{2, 5000, 8}, Case{9, 100, 0},
        Case{9, 48, 16}, Case{7, 63, 1}, Case{1, 16, 0}}) {
    for (const size_t at : {0, 1, 2, 4, 8, 16, 48, 60}) {
      for (const uint64_t image : {uint64_t{0}, uint64_t{3}, uint64_t{20}, uint64_t{4096 - 64}, uint64_t{12'345'678}}) {
        const size_t pitch = row_bytes + gap;
        const auto data = random_bytes(rows * row_bytes, static_cast<uint32_t>(at));
        GuardedBytes src(data.size(), 0);
        std::ranges::copy(data, src.data());
        std::vector<std::byte> dst(rows * pitch + 128), expected(dst.size());
        const size_t first = (0 - reinterpret_cast<uintptr_t>(dst.data())) % 64 + at;
        Digest whole;
        for (size_t r = 0; r < rows; ++r) {
          std::copy_n(data.data() + r * row_bytes, row_bytes, expected.data() + first + r * pitch);
          whole += slow_digest(image + r * pitch, data.data() + r * row_bytes, row_bytes);
        }
        Digest digest;
        digest_copy_rows(digest, image, pitch, dst.data() + first, static_cast<ptrdiff_t>(pitch), src.data(),
                         static_cast<ptrdiff_t>(row_bytes), row_bytes, rows);
        stream_fence();
        ASSERT_EQ(digest, whole) << rows << " rows of " << row_bytes << " at " << at << ", image " << image;
        ASSERT_EQ(dst, expected) << rows << " rows of " << row_bytes << " at " << at << ", image " << image;
      }
    }
  }
}

TEST_P(DigestTest, RowsMayRunBackwardsInMemoryAndBeWhole) {
  const auto image = random_bytes(64 * 256, 5);
  Digest whole;
  digest_rows(whole, 0, 256, image.data(), 256, 256, 64);
  EXPECT_EQ(whole, digest_of(0, image.data(), image.size()));

  std::vector<std::byte> reversed(image.size());
  for (size_t r = 0; r < 64; ++r) std::copy_n(image.data() + r * 256, 256, reversed.data() + (63 - r) * 256);
  Digest backwards;
  digest_rows(backwards, 0, 256, reversed.data() + 63 * 256, -256, 256, 64);
  EXPECT_EQ(backwards, whole);
}

TEST_P(DigestTest, EverySingleBitAndEverySwapOfElementsShows) {
  auto image = random_bytes(8192, 6);
  const Digest before = digest_of(0, image.data(), image.size());
  for (size_t bit = 0; bit < 8 * image.size(); bit += 37) {
    image[bit / 8] ^= std::byte{1} << bit % 8;
    ASSERT_NE(digest_of(0, image.data(), image.size()), before) << "bit " << bit;
    image[bit / 8] ^= std::byte{1} << bit % 8;
  }
  for (size_t at = 0; at + 4098 <= image.size(); at += 34) {  // swaps half-words that are a block apart
    std::swap_ranges(image.begin() + static_cast<ptrdiff_t>(at), image.begin() + static_cast<ptrdiff_t>(at) + 2,
                     image.begin() + static_cast<ptrdiff_t>(at) + 4096);
    ASSERT_NE(digest_of(0, image.data(), image.size()), before) << "byte " << at;
    std::swap_ranges(image.begin() + static_cast<ptrdiff_t>(at), image.begin() + static_cast<ptrdiff_t>(at) + 2,
                     image.begin() + static_cast<ptrdiff_t>(at) + 4096);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, DigestTest, every_kernel(), kernel_name);

TEST(DigestValueTest, AddsMemberByMember) {
  const Digest a{{1, ~uint64_t{0}}, 3};
  const Digest b{{2, 2}, 4};
  EXPECT_EQ(a + b, (Digest{{3, 1}, 7}));
  EXPECT_NE(a, (Digest{{1, ~uint64_t{0}}, 4})) << "the element count is part of it";
  EXPECT_EQ((Digest{{0xAB, 1}, 0}).to_string(), "00000000000000ab0000000000000001");
}

}  // namespace
}  // namespace tessera
