#include "exec/delta_piece.h"

#include "exec/route_walk.h"

namespace tessera {
namespace {

int64_t aligned(int64_t bytes) {
  return (bytes + kDeltaAlignment - 1) / kDeltaAlignment * kDeltaAlignment;
}

}  // namespace

DeltaPiece::DeltaPiece(const RouteRegion& what)
    : atoms_(what.region.size() / elements_per_atom(what.dtype)), atom_bytes_(tessera::atom_bytes(what.dtype)) {
  bitmap_ = aligned(count_bytes());
  const int64_t words = (atoms_ + 63) / 64;
  values_ = aligned(bitmap_ + words * static_cast<int64_t>(sizeof(uint64_t)));
}

PartSize delta_part_size(const DeltaPiece& piece) {
  return {.atoms = piece.segments(),
          .atom_bytes = std::max<int64_t>(std::min(DeltaPiece::kSegmentAtoms, piece.atoms()) * piece.atom_bytes(), 1)};
}

int64_t DeltaPiece::read_bytes(int64_t segment, int64_t changed) const {
  return changed == 0 ? 0 : word_bytes(segment) + changed * atom_bytes_;
}

}  // namespace tessera
