#include "etp/schedule/sharding.h"

#include <vector>

#include "base/fail.h"

namespace tessera::etp {

std::string to_string(const Sharding& sharding) {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < sharding.ranks; ++rank) sizes.push_back(sharding.rows_of(rank).size());
  return fmt::format("rows {} over {} ranks, aligned to {}: {}", sharding.rows, sharding.ranks, sharding.alignment,
                     fmt::join(sizes, " "));
}

int64_t alignment_of(const WeightFormat& format, int64_t pad_for_alignment) {
  const int64_t least = format.quantised() ? format.alignment() : 1;
  if (pad_for_alignment < 0 || pad_for_alignment > kMaxAlignment)
    fail(ErrorCode::kInvalidArgument, "pad_for_alignment is {}: give 0 (no padding) to {} rows"_message,
         pad_for_alignment, kMaxAlignment);
  if (pad_for_alignment == 0) {
    if (format.quantised())
      fail(ErrorCode::kInvalidArgument,
           "pad_for_alignment is 0, which is possible with plain dtypes only: {} needs {} or a multiple"_message,
           to_string(format), least);
    return 0;
  }
  if (pad_for_alignment > least && pad_for_alignment % least != 0)
    fail(ErrorCode::kInvalidArgument, "pad_for_alignment is {}, not a multiple of the {} rows of {}: give {}"_message,
         pad_for_alignment, least, to_string(format), (pad_for_alignment / least + 1) * least);
  return std::max(least, pad_for_alignment);
}

Sharding shard_rows(int64_t rows, int ranks, int64_t alignment) {
  if (rows < 1 || rows > kMaxRows || ranks < 1 || ranks > kMaxGroupRanks)
    fail(ErrorCode::kInvalidArgument, "{} rows over {} ranks: give 1 to {} rows and 1 to {} ranks"_message, rows, ranks,
         kMaxRows, kMaxGroupRanks);
  if (alignment < 0 || alignment > kMaxAlignment)
    fail(ErrorCode::kInvalidArgument, "an alignment of {} rows: give 0 (no padding) to {}"_message, alignment,
         kMaxAlignment);
  if (alignment == 0 && rows % ranks != 0)
    fail(
        ErrorCode::kInvalidArgument,
        "{} rows cannot be cut into {} equal shards without padding: pad_for_alignment={} is the next that can"_message,
        rows, ranks, WeightFormat().alignment());
  Sharding sharding{.rows = rows, .ranks = ranks, .alignment = alignment};
  const int64_t unit = alignment * ranks;
  if (unit > 0) sharding.pad = (unit - rows % unit) % unit;
  sharding.padded = rows + sharding.pad;
  sharding.per_rank = sharding.padded / ranks;
  return sharding;
}

}  // namespace tessera::etp
