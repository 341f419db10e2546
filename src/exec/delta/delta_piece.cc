#include "exec/delta/delta_piece.h"

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

PartSize delta_part_size(const DeltaPiece& piece) {
  return {.atoms = piece.segments(),
          .atom_bytes = std::max<int64_t>(std::min(DeltaPiece::kSegmentAtoms, piece.atoms()) * piece.atom_bytes(), 1)};
}

}  // namespace tessera
