#include "etp/schedule/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "base/testing.h"
#include "tessera/error.h"

namespace tessera::etp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<int64_t> sizes(const Sharding& sharding) {
  std::vector<int64_t> all;
  for (int rank = 0; rank < sharding.ranks; ++rank) all.push_back(sharding.rows_of(rank).size());
  return all;
}

TEST(Sharding, Examples) {
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes(shard_rows(63, 4, 16)), (Sizes{16, 16, 16, 15}));
  EXPECT_EQ(sizes(shard_rows(17, 4, 16)), (Sizes{16, 1, 0, 0}));
  EXPECT_EQ(sizes(shard_rows(56, 4, 16)), (Sizes{16, 16, 16, 8}));
  EXPECT_EQ(sizes(shard_rows(120, 4, 32)), (Sizes{32, 32, 32, 24}));
  EXPECT_EQ(sizes(shard_rows(64, 4, 16)), (Sizes{16, 16, 16, 16}));
  EXPECT_EQ(sizes(shard_rows(1, 4, 16)), (Sizes{1, 0, 0, 0}));
  const Sharding bert = shard_rows(30522, 4, 16);
  EXPECT_EQ(bert.per_rank, 7632);
  EXPECT_EQ(bert.rows_of(3).size(), 7626);
  EXPECT_EQ(to_string(shard_rows(63, 4, 16)), "rows 63 over 4 ranks, aligned to 16: 16 16 16 15");
}

// The smallest number of rows a rank, in units of `alignment`, that holds them all; dealt out row by row.
std::optional<std::vector<std::vector<int64_t>>> dealt(int64_t rows, int ranks, int64_t alignment) {
  const int64_t unit = alignment == 0 ? 1 : alignment;
  int64_t per_rank = unit;
  while (per_rank * ranks < rows) per_rank += unit;
  if (alignment == 0 && per_rank * ranks != rows) return std::nullopt;
  std::vector<std::vector<int64_t>> owned(static_cast<size_t>(ranks));
  for (int64_t row = 0; row < rows; ++row) owned[static_cast<size_t>(row / per_rank)].push_back(row);
  return owned;
}

TEST(Sharding, OfEverySmallWeightIsAsDealtRowByRow) {
  for (const int64_t alignment : {0, 16, 32, 128})
    for (int64_t rows = 1; rows <= 140; ++rows)
      for (int ranks = 1; ranks <= 8; ++ranks) {
        SCOPED_TRACE(testing::Message() << rows << " " << ranks << " " << alignment);
        const auto expected = dealt(rows, ranks, alignment);
        if (!expected) {
          ASSERT_THAT(error_of([&] { shard_rows(rows, ranks, alignment); }), HasSubstr("without padding"));
          continue;
        }
        const Sharding sharding = shard_rows(rows, ranks, alignment);
        int64_t pads = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const RowRange range = sharding.rows_of(rank);
          const std::vector<int64_t>& owned = (*expected)[static_cast<size_t>(rank)];
          ASSERT_EQ(range.size(), static_cast<int64_t>(owned.size()));
          ASSERT_EQ(range.empty(), owned.empty());
          if (!owned.empty()) {
            ASSERT_EQ(range.begin, owned.front());
          }
          for (const int64_t row : owned) ASSERT_EQ(sharding.owner_of(row), rank);
          pads += sharding.pad_of(rank);
          ASSERT_EQ(sharding.is_padded_last_rank(rank), rank == ranks - 1 && range.size() < sharding.per_rank);
        }
        ASSERT_EQ(pads, sharding.pad);
        ASSERT_EQ(sharding.padded, sharding.per_rank * ranks);
        if (alignment > 0) {
          ASSERT_EQ(sharding.per_rank % alignment, 0);
        }
      }
}

TEST(Sharding, WithoutPaddingTheErrorNamesTheRowsTheRanksAndTheNextAlignment) {
  EXPECT_THAT(error_of([] { shard_rows(63, 4, 0); }),
              AllOf(HasSubstr("63 rows"), HasSubstr("4 equal"), HasSubstr("=16")));
  EXPECT_EQ(shard_rows(60, 4, 0).pad, 0);
  EXPECT_EQ(shard_rows(60, 4, 0).per_rank, 15);
}

TEST(Sharding, SizesOutOfRangeAreRefused) {
  EXPECT_THAT(error_of([] { shard_rows(0, 4, 16); }), HasSubstr("0 rows over 4 ranks"));
  EXPECT_THAT(error_of([] { shard_rows(8, 0, 16); }), HasSubstr("8 rows over 0 ranks"));
  EXPECT_THAT(error_of([] { shard_rows(int64_t{1} << 41, 2, 16); }), HasSubstr("over 2 ranks"));
  EXPECT_THAT(error_of([] { shard_rows(8, 2, -16); }), HasSubstr("alignment of -16"));
}

TEST(Alignment, IsTheLargerOfTheFormatsAndTheOption) {
  const WeightFormat bf16(DType::kBF16);
  const WeightFormat mxfp8(Format::kMxfp8);
  EXPECT_EQ(alignment_of(bf16, 0), 0);
  EXPECT_EQ(alignment_of(bf16, 1), 1);
  EXPECT_EQ(alignment_of(bf16, 8), 8);
  EXPECT_EQ(alignment_of(WeightFormat(Format::kNvfp4), 8), 16);
  EXPECT_EQ(alignment_of(bf16, 16), 16);
  EXPECT_EQ(alignment_of(bf16, 24), 24);
  EXPECT_EQ(alignment_of(bf16, 48), 48);
  EXPECT_EQ(alignment_of(mxfp8, 16), 32);
  EXPECT_EQ(alignment_of(WeightFormat(Format::kFp8Block128x128), 16), 128);
  EXPECT_EQ(alignment_of(WeightFormat(Format::kNvfp4), 64), 64);
  EXPECT_THAT(error_of([&] { alignment_of(mxfp8, 0); }), AllOf(HasSubstr("mxfp8 needs 32"), HasSubstr("plain dtypes")));
  EXPECT_THAT(error_of([&] { alignment_of(mxfp8, 48); }), AllOf(HasSubstr("48"), HasSubstr("give 64")));
  EXPECT_THAT(error_of([&] { alignment_of(bf16, -1); }), HasSubstr("-1"));
}

}  // namespace
}  // namespace tessera::etp
