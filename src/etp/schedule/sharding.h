// How the rows of a weight are cut over the N ranks of an ETP group. Values and pure functions; thread-safe.
//
//   pad = (A*N - F % (A*N)) % (A*N),  P = F + pad,  s = P / N;  rank r owns rows [min(r*s, F), min((r+1)*s, F))
//
// The last shards may be short or empty, and F may be below N. Padding rows exist only in communication buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "etp/schedule/weight_format.h"
#include "tessera/etp.h"

namespace tessera::etp {

struct Sharding {
  int64_t rows = 0;       // F, of the weight
  int ranks = 1;          // N
  int64_t alignment = 0;  // A; 0: no padding, the ranks divide the rows
  int64_t pad = 0;        // rows that are added at the end
  int64_t padded = 0;     // P = F + pad
  int64_t per_rank = 0;   // s = P / N, a multiple of A

  // REQUIRES: 0 <= rank < ranks.
  RowRange rows_of(int rank) const { return {std::min(rank * per_rank, rows), std::min((rank + 1) * per_rank, rows)}; }
  int64_t pad_of(int rank) const {
    return per_rank - rows_of(rank).size();
  }  // of this rank's shard; they sum up to `pad`
  bool is_padded_last_rank(int rank) const { return rank == ranks - 1 && pad > 0; }
  int owner_of(int64_t row) const { return static_cast<int>(row / per_rank); }  // REQUIRES: 0 <= row < rows

  friend bool operator==(const Sharding&, const Sharding&) = default;
};

// "rows 63 over 4 ranks, aligned to 16: 16 16 16 15"
std::string to_string(const Sharding& sharding);

inline constexpr int kMaxGroupRanks = 4096;
inline constexpr int64_t kMaxAlignment = 1 << 20;
inline constexpr int64_t kMaxRows = int64_t{1} << 40;

// A of a weight: the larger of the format's, where it has blocks, and `pad_for_alignment`. Throws
// Error(kInvalidArgument) for a `pad_for_alignment` below 0, for 0 with a quantised format, and for one above the
// format's alignment that is no multiple of it (a block would have rows of two shards).
int64_t alignment_of(const WeightFormat& format, int64_t pad_for_alignment);

// Throws Error(kInvalidArgument) that names both for rows below 1 or a number of ranks that is not possible, and, where
// `alignment` is 0 and the ranks do not divide the rows, that names F, N and the next legal alignment.
Sharding shard_rows(int64_t rows, int ranks, int64_t alignment);

}  // namespace tessera::etp
