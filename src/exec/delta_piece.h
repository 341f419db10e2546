// The changes of a route since the version before, as they travel: a *delta piece*, bytes of a layout that both ends
// compute from the route alone. Atoms (of f4 pairs, else elements) are numbered as in the route's stream, and cut into
// segments of kSegmentAtoms, so that threads need not wait for each other:
//
//   counts   u32 [segments]                  atoms of the segment that have changed
//   bitmap   u64 [segments][kSegmentAtoms / 64]   bit i % 64 of word i / 64: atom i of the segment has changed
//   values   [segments][kSegmentAtoms]       of each segment those that have changed, packed from its beginning on, in
//                                            the source's dtype
//
// The last segment is as long as the route leaves it, its last word filled with zeros. Each section begins at a
// multiple of kDeltaAlignment. Of a segment whose count is 0 neither the bitmap nor the values are there to be read.
//
// As every segment has room for all its atoms, a reader that trusts no more than its own layout stays within the piece,
// whatever it reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "exec/route.h"
#include "exec/units.h"

namespace tessera {

inline constexpr int64_t kDeltaAlignment = 64;

// A value.
class DeltaPiece {
 public:
  static constexpr int64_t kSegmentAtoms = int64_t{1} << 18;
  static constexpr int64_t kSegmentWords = kSegmentAtoms / 64;
  static constexpr int64_t kChunkAtoms = 4096;  // that either side works on at a time: they fit the first-level cache

  explicit DeltaPiece(const RouteRegion& what);

  int64_t atoms() const { return atoms_; }
  int64_t atom_bytes() const { return atom_bytes_; }
  int64_t full_bytes() const { return atoms_ * atom_bytes_; }  // of the route without a delta
  int64_t bytes() const { return values_ + full_bytes(); }     // that the piece spans
  int64_t head_bytes() const { return values_; }               // counts and bitmap

  int64_t segments() const { return (atoms_ + kSegmentAtoms - 1) / kSegmentAtoms; }
  int64_t first_atom(int64_t segment) const { return segment * kSegmentAtoms; }
  int64_t segment_atoms(int64_t segment) const { return std::min(kSegmentAtoms, atoms_ - first_atom(segment)); }
  // Offsets in the piece.
  int64_t count(int64_t segment) const { return segment * static_cast<int64_t>(sizeof(uint32_t)); }
  int64_t words(int64_t segment) const { return bitmap_ + segment * kSegmentWords * static_cast<int64_t>(sizeof(uint64_t)); }
  int64_t values(int64_t segment) const { return values_ + first_atom(segment) * atom_bytes_; }

  int64_t word_bytes(int64_t segment) const { return (segment_atoms(segment) + 63) / 64 * static_cast<int64_t>(sizeof(uint64_t)); }
  // What is read of a segment of which `changed` atoms have changed.
  int64_t read_bytes(int64_t segment, int64_t changed) const;
  // Of all counts, with those of segments that have not changed.
  int64_t count_bytes() const { return segments() * static_cast<int64_t>(sizeof(uint32_t)); }

 private:
  int64_t atoms_ = 0;
  int64_t atom_bytes_ = 1;
  int64_t bitmap_ = 0;  // where the sections begin
  int64_t values_ = 0;
};

// For cut_into_units(): in segments.
PartSize delta_part_size(const DeltaPiece& piece);

}  // namespace tessera
