#include "codec/simd/stream.h"

#include <gtest/gtest.h>

#include "codec/codec_testing.h"

namespace tessera {
namespace {

class StreamTest : public EveryKernelTest {};

TEST_P(StreamTest, CopiesEveryLengthAtEveryAlignmentAndNothingElse) {
  const auto random = random_bytes(5000, 1);
  std::vector<size_t> lengths(200);
  for (size_t n = 0; n < lengths.size(); ++n) lengths[n] = n;
  lengths.push_back(4999);
  for (const size_t n : lengths) {
    for (size_t misalignment = 0; misalignment < 64; misalignment += n < 200 ? 1 : 7) {
      GuardedBytes src(n, (misalignment * 5 + n) % 64);
      GuardedBytes dst(n, misalignment);
      std::copy_n(random.data(), n, src.data());
      copy_stream(dst.data(), src.data(), n);
      stream_fence();
      ASSERT_TRUE(std::equal(dst.data(), dst.data() + n, random.data())) << n << " bytes at " << misalignment;
      ASSERT_TRUE(dst.intact()) << n << " bytes at " << misalignment;
    }
  }
}

TEST_P(StreamTest, RowsGoFromTheirPlacesToTheirPlaces) {
  const auto src = random_bytes(size_t{40} * 700, 2);
  for (const size_t row_bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{130}, size_t{512}, size_t{700}}) {
    for (const ptrdiff_t dst_stride : {ptrdiff_t{700}, ptrdiff_t{704}, ptrdiff_t{-701}}) {
      std::vector<std::byte> dst(size_t{40} * 704);
      std::byte* first = dst_stride > 0 ? dst.data() : dst.data() + 39 * 701;
      copy_stream_rows(first, dst_stride, src.data(), 700, row_bytes, 40);
      stream_fence();
      for (ptrdiff_t row = 0; row < 40; ++row) {
        ASSERT_EQ(std::memcmp(first + row * dst_stride, src.data() + row * 700, row_bytes), 0)
            << row_bytes << " bytes, stride " << dst_stride << ", row " << row;
      }
      size_t written = 0;
      for (const std::byte b : dst) written += b != std::byte{0} ? 1 : 0;
      EXPECT_LE(written, 40 * row_bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, StreamTest, every_kernel(), kernel_name);

}  // namespace
}  // namespace tessera
