#include "exec/pull/staging.h"

#include <algorithm>

namespace tessera {

Status fetch(const Connection& peer, const Bytes& from, int64_t offset, std::span<std::byte> out) {
  if (out.empty()) return {};
  const Piece piece{from.origin + static_cast<uint64_t>(offset), out.size()};
  return peer.get(from.key, std::span(&piece, 1), std::span(&out, 1));
}

Status fetch_segment(const Connection& peer, const DeltaPart& part, int64_t number, std::span<std::byte> room,
                     DeltaSegment& segment) {
  const DeltaPiece& piece = part.reader.piece();
  segment = {};
  const std::span<std::byte> count = std::as_writable_bytes(std::span(&segment.count, 1));
  if (Status status = fetch(peer, part.piece, piece.count(number), count); !status.ok()) return status;
  if (segment.count == 0) return {};
  const std::span<std::byte> summaries = room.first(static_cast<size_t>(piece.summary_bytes(number)));
  if (Status status = fetch(peer, part.piece, piece.summaries(number), summaries); !status.ok()) return status;
  const int64_t changed = std::min<int64_t>(segment.count, piece.segment_atoms(number));
  const auto word_bytes = static_cast<size_t>(bitmap_words(piece, number, summaries.data())) * sizeof(uint64_t);
  const std::span<std::byte> words = room.subspan(summaries.size(), word_bytes);
  if (Status status = fetch(peer, part.piece, piece.words(number), words); !status.ok()) return status;
  const std::span<std::byte> values =
      room.subspan(summaries.size() + word_bytes, static_cast<size_t>(changed * piece.atom_bytes()));
  if (Status status = fetch(peer, part.piece, piece.values(number), values); !status.ok()) return status;
  segment.summaries = summaries.data();
  segment.words = words.data();
  segment.values = values.data();
  return {};
}

}  // namespace tessera
