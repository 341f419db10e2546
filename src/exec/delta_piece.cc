#include "exec/delta_piece.h"

#include "exec/route_walk.h"

namespace tessera {
namespace {

int64_t aligned_part(int64_t bytes) {
  return (bytes + kDeltaAlignment - 1) / kDeltaAlignment * kDeltaAlignment;
}

}  // namespace

DeltaPiece::DeltaPiece(const RouteRegion& what)
    : atoms_(what.region.size() / elements_per_atom(what.dtype)), atom_bytes_(tessera::atom_bytes(what.dtype)) {
  const auto of = [&](int64_t atoms) { return (atoms_ + atoms - 1) / atoms * kWordBytes; };
  summaries_ = aligned_part(count_bytes());
  words_ = aligned_part(summaries_ + of(kChunkAtoms));
  values_ = aligned_part(words_ + of(kWordAtoms));
}

PartSize delta_part_size(const DeltaPiece& piece) {
  return {.atoms = piece.segments(),
          .atom_bytes = std::max<int64_t>(std::min(DeltaPiece::kSegmentAtoms, piece.atoms()) * piece.atom_bytes(), 1)};
}

}  // namespace tessera
