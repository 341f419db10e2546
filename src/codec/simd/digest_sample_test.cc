#include "codec/simd/digest_sample.h"

#include <gtest/gtest.h>

#include <set>

#include "codec/codec_testing.h"

namespace tessera {
namespace {

constexpr size_t kBlock = 16384;
constexpr size_t kGroup = 16 * kBlock;

// The definition of docs/formats/digest.md: the digest of the image with all that is not chosen zeroed.
Digest slow_sampled(const DigestSample& sample, const std::vector<std::byte>& image) {
  std::vector<std::byte> kept(image.size());
  for (size_t i = 0; i < image.size(); ++i)
    if (i / kBlock == sample.block(i / kGroup)) kept[i] = image[i];
  Digest digest;
  digest_bytes(digest, 0, kept.data(), kept.size());
  return digest;
}

class DigestSampleTest : public EveryKernelTest {};

// Columns of a matrix, cut by rows too, where they lie in it and packed: all of them add up to the definition.
TEST_P(DigestSampleTest, DoesNotDependOnTheLayout) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const size_t row_bytes = 1 + random() % (round % 3 == 0 ? 800'000 : round % 3 == 1 ? 5000 : 70);
    const size_t rows = 1 + random() % (1 + 1'600'000 / row_bytes);
    const auto image = random_bytes(rows * row_bytes, 100 + static_cast<unsigned>(round));
    const DigestSample sample(random(), static_cast<uint32_t>(random()));
    const Digest whole = slow_sampled(sample, image);
    Digest strided, packed;
    const size_t cuts = 1 + random() % 4, row_cuts = 1 + random() % 3;
    for (size_t c = 0; c < cuts; ++c) {
      const size_t begin = row_bytes * c / cuts, width = row_bytes * (c + 1) / cuts - begin;
      for (size_t part = 0; part < row_cuts; ++part) {
        const size_t first = rows * part / row_cuts, count = rows * (part + 1) / row_cuts - first;
        const size_t at = first * row_bytes + begin;
        digest_sampled_rows(strided, sample, at, row_bytes, image.data() + at, static_cast<ptrdiff_t>(row_bytes), width,
                            count);
        std::vector<std::byte> copy;
        for (size_t r = 0; r < count; ++r)
          copy.insert(copy.end(), image.begin() + static_cast<ptrdiff_t>(at + r * row_bytes),
                      image.begin() + static_cast<ptrdiff_t>(at + r * row_bytes + width));
        digest_sampled_rows(packed, sample, at, row_bytes, copy.data(), static_cast<ptrdiff_t>(width), width, count);
      }
    }
    ASSERT_EQ(strided, whole) << rows << " rows of " << row_bytes;
    ASSERT_EQ(packed, whole) << rows << " rows of " << row_bytes;
  }
}

TEST_P(DigestSampleTest, SeesWhatChangesInAChosenBlockAndNothingElse) {
  auto image = random_bytes(5 * kGroup + 1234, 7);
  const DigestSample sample(3, 8);
  const auto digest_of = [&] {
    Digest digest;
    digest_sampled_rows(digest, sample, 0, image.size(), image.data(), 0, image.size(), 1);
    return digest;
  };
  const Digest before = digest_of();
  std::mt19937 random(9);
  for (int round = 0; round < 400; ++round) {
    const size_t at = random() % image.size();
    const auto bit = static_cast<std::byte>(1 << random() % 8);
    image[at] ^= bit;
    EXPECT_EQ(digest_of() != before, at / kBlock == sample.block(at / kGroup)) << at;
    image[at] ^= bit;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, DigestSampleTest, every_kernel(), kernel_name);

DigestSample sample_of(uint64_t session, int64_t version, uint32_t tensor) {
  return {*seed_of_version(session, version), tensor};
}

TEST(DigestSample, EverySessionVersionAndTensorChoosesOthers) {
  const DigestSample one = sample_of(3, 1, 0);
  for (const DigestSample& other : {sample_of(4, 1, 0), sample_of(3, 2, 0), sample_of(3, 1, 1)}) {
    size_t same = 0;
    for (uint64_t group = 0; group < 1000; ++group) same += one.block(group) == other.block(group);
    EXPECT_LT(same, 130u);  // 62 are expected
  }
}

TEST(DigestSample, ThereIsNoneWithoutASessions) {
  EXPECT_EQ(seed_of_version(std::nullopt, 1), std::nullopt);
}

// Of the first group, too, which is all that a small tensor has.
TEST(DigestSample, VersionsCoverEveryBlockEvenly) {
  for (const uint64_t group : {0, 1, 77}) {
    std::vector<int> chosen(16);
    for (int64_t version = 1; version <= 1600; ++version) ++chosen[sample_of(9, version, 5).block(group) - 16 * group];
    for (const int times : chosen) EXPECT_NEAR(times, 100, 50);
  }
}

}  // namespace
}  // namespace tessera
