// Gathers the pieces of many routes into few large gets. One thread, one batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "exec/pull/pull_program.h"
#include "transport/connection.h"

namespace tessera {

// Copies what lies packed at `packed`, atoms [first, last) of `part`, to its destination. Shared with streams.
void unpack(const PullPart& part, int64_t first, int64_t last, const std::byte* packed, Digest* digest,
            const DigestSample* sample);

class GetBatch {
 public:
  // `staging` holds what is not written straight to its destination. `sample`: see Run::start().
  GetBatch(const PullProgram::Impl& program, std::span<std::byte> staging, const SampleSeed& sample)
      : program_(program), staging_(staging), sample_(sample) {}

  // Queues atoms [first, last) of a part. Calls finished(part, first, last, Digest*) for what has reached its
  // destination.
  template <typename Finished>
  Status add(const PullPart& part, int64_t first, int64_t last, Finished finished);
  // Fetches and finishes all that is queued.
  template <typename Finished>
  Status finish(Finished finished);

 private:
  static constexpr size_t kMaxPieces = 1024;
  static constexpr size_t kMaxEntries = 256;
  static constexpr int64_t kDirectBytes = int64_t{1} << 20;

  // Part of a route that is queued.
  struct Entry {
    const PullPart* part = nullptr;
    int64_t first = 0;
    int64_t last = 0;
    size_t staged_at = 0;  // not direct
  };

  Status queue(const PullPart& part, int64_t first, int64_t last, size_t staged_at);
  Status queue_piece(const PullPart& part, int64_t offset, std::byte* out, size_t bytes);
  Status fetch();
  Digest settle(const Entry& entry) const;

  const PullProgram::Impl& program_;
  std::span<std::byte> staging_;
  const SampleSeed sample_;
  size_t staged_ = 0;
  int64_t direct_bytes_ = 0;
  size_t entry_count_ = 0;
  size_t piece_count_ = 0;
  size_t out_count_ = 0;
  uint32_t key_ = 0;  // of all pieces that are queued
  std::array<Entry, kMaxEntries> entries_;
  std::array<Piece, kMaxPieces> pieces_;
  std::array<std::span<std::byte>, kMaxPieces> outs_;
};

template <typename Finished>
Status GetBatch::add(const PullPart& part, int64_t first, int64_t last, Finished finished) {
  const int64_t bytes = part.kernel.source_bytes();
  while (first < last) {
    const int64_t room =
        part.direct ? (kDirectBytes - direct_bytes_) / bytes : static_cast<int64_t>(staging_.size() - staged_) / bytes;
    if (room <= 0 || entry_count_ == kMaxEntries) {
      if (Status status = finish(finished); !status.ok()) return status;
      continue;
    }
    const int64_t count = std::min(room, last - first);
    if (Status status = queue(part, first, first + count, staged_); !status.ok()) return status;
    if (part.direct) {
      direct_bytes_ += count * bytes;
    } else {
      staged_ += static_cast<size_t>((count * bytes + StreamLayout::kAlignment - 1) / StreamLayout::kAlignment *
                                     StreamLayout::kAlignment);
      staged_ = std::min(staged_, staging_.size());
    }
    first += count;
  }
  return {};
}

template <typename Finished>
Status GetBatch::finish(Finished finished) {
  if (Status status = fetch(); !status.ok()) return status;
  for (size_t e = 0; e < entry_count_; ++e) {
    const Entry& entry = entries_[e];
    finished(*entry.part, (entry.last - entry.first), settle(entry));
  }
  entry_count_ = 0;
  staged_ = 0;
  direct_bytes_ = 0;
  return {};
}

}  // namespace tessera
