#include "exec/pull/get_batch.h"

namespace tessera {

void unpack(const PullPart& part, int64_t first, int64_t last, const std::byte* packed, Digest* digest,
            const DigestSample* sample) {
  const int64_t skipped = first * part.kernel.source_bytes();
  part.walk.visit(first, last, [&](Block block) {
    block.offset[kSource] -= skipped;
    part.kernel.run(block, packed, part.data, digest, sample);
  });
}

Status GetBatch::queue(const PullPart& part, int64_t first, int64_t last, size_t staged_at) {
  const Walk& walk = part.direct ? part.walk : part.remote;
  const int64_t bytes = part.kernel.source_bytes();
  // The offset that a packed destination has at `first` is where staging begins.
  std::byte* out = part.direct ? part.data : staging_.data() + staged_at;
  const int64_t skipped = part.direct ? 0 : first * bytes;
  Status status;
  walk.visit(first, last, [&](const Block& block) {
    for (int64_t r = 0; r < block.rows && status.ok(); ++r)
      status = queue_piece(part, block.offset[kSource] + r * block.row_step[kSource],
                           out + (block.offset[kDestination] + r * block.row_step[kDestination] - skipped),
                           static_cast<size_t>(block.row_atoms * bytes));
  });
  entries_[entry_count_++] = {&part, first, last, staged_at};
  return status;
}

Status GetBatch::queue_piece(const PullPart& part, int64_t offset, std::byte* out, size_t bytes) {
  const auto at = static_cast<uint64_t>(part.origin + offset);
  if (piece_count_ == kMaxPieces || out_count_ == kMaxPieces || (piece_count_ > 0 && key_ != part.key))
    if (Status status = fetch(); !status.ok()) return status;
  key_ = part.key;
  if (piece_count_ > 0 && pieces_[piece_count_ - 1].offset + pieces_[piece_count_ - 1].bytes == at) {
    pieces_[piece_count_ - 1].bytes += bytes;
  } else {
    pieces_[piece_count_++] = {at, bytes};
  }
  if (out_count_ > 0 && outs_[out_count_ - 1].data() + outs_[out_count_ - 1].size() == out) {
    outs_[out_count_ - 1] = {outs_[out_count_ - 1].data(), outs_[out_count_ - 1].size() + bytes};
  } else {
    outs_[out_count_++] = {out, bytes};
  }
  return {};
}

Status GetBatch::fetch() {
  if (piece_count_ == 0) return {};
  Status status = program_.peer->get(key_, std::span(pieces_).first(piece_count_), std::span(outs_).first(out_count_));
  piece_count_ = 0;
  out_count_ = 0;
  return status;
}

// What remains to do once the bytes are there.
Digest GetBatch::settle(const Entry& entry) const {
  const PullPart& part = *entry.part;
  Digest digest;
  const PartDigest how = program_.digest ? PartDigest(sample_, part.tensor, part.image) : PartDigest();
  if (!part.direct) {
    unpack(part, entry.first, entry.last, staging_.data() + entry.staged_at, how.into(digest), how.sample());
  } else if (how.any()) {
    part.walk.visit(entry.first, entry.last, [&](Block block) {
      block.offset[kSource] = block.offset[kDestination];  // what has arrived
      block.row_step[kSource] = block.row_step[kDestination];
      digest_block(digest, block, part.data, part.kernel.source_bytes(), how.sample());
    });
  }
  return digest;
}

}  // namespace tessera
