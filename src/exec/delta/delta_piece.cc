#include "exec/delta/delta_piece.h"

#include <bit>
#include <cstring>

#include "base/rounding.h"
#include "exec/walk/route_walk.h"

namespace tessera {
DeltaPiece::DeltaPiece(const RouteRegion& what)
    : atoms_(what.region.size() / elements_per_atom(what.dtype)), atom_bytes_(tessera::atom_bytes(what.dtype)) {
  const auto of = [&](int64_t atoms) { return (atoms_ + atoms - 1) / atoms * kWordBytes; };
  summaries_ = round_up(count_bytes(), kDeltaAlignment);
  words_ = round_up(summaries_ + of(kChunkAtoms), kDeltaAlignment);
  values_ = round_up(words_ + of(kWordAtoms), kDeltaAlignment);
}

DeltaSegment DeltaSegment::of_piece(const DeltaPiece& piece, const std::byte* from, int64_t segment) {
  DeltaSegment of{.count = 0,
                  .summaries = from + piece.summaries(segment),
                  .words = from + piece.words(segment),
                  .values = from + piece.values(segment)};
  std::memcpy(&of.count, from + piece.count(segment), sizeof(of.count));
  return of;
}

int64_t bitmap_words(const DeltaPiece& piece, int64_t segment, const std::byte* summaries) {
  int64_t words = 0;
  for (int64_t done = 0; done < piece.segment_atoms(segment); done += DeltaPiece::kChunkAtoms) {
    uint64_t summary = 0;
    std::memcpy(&summary, summaries + done / DeltaPiece::kChunkAtoms * 8, sizeof(summary));
    words +=
        std::popcount(summary & summary_mask(std::min(DeltaPiece::kChunkAtoms, piece.segment_atoms(segment) - done)));
  }
  return words;
}

PartSize delta_part_size(const DeltaPiece& piece) {
  return {.atoms = piece.segments(),
          .atom_bytes = std::max<int64_t>(std::min(DeltaPiece::kSegmentAtoms, piece.atoms()) * piece.atom_bytes(), 1)};
}

}  // namespace tessera
