// The wire format of a route's changes since the version before: a *delta piece*, whose layout both ends compute from
// the route. Atoms (pairs of elements for f4, otherwise elements) are numbered as in the route's stream and cut into
// segments of kSegmentAtoms, so that threads need not wait for each other, and segments into chunks of kChunkAtoms:
//
//   counts      u32 per segment the number of its atoms that have changed
//   summaries   u64 per chunk   bit w: word w of the chunk's bitmap is not 0
//   bitmap      u64 [64] per chunk, only the words that are not 0, packed, from the start of each segment's room;
//               bit i of word w is atom 64 w + i
//   values      the changed atoms of each segment, packed, in the source's dtype
//
// Each section begins at a multiple of kDeltaAlignment, and has room for all words and atoms of each segment. A segment
// whose count is 0 has no other valid data. So a reader that trusts only the layout that it has computed stays within
// the piece, whatever it reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "exec/units.h"
#include "exec/walk/route.h"

namespace tessera {

inline constexpr int64_t kDeltaAlignment = 64;

// A value.
class DeltaPiece {
 public:
  static constexpr int64_t kSegmentAtoms = int64_t{1} << 18;
  static constexpr int64_t kWordAtoms = 64;
  static constexpr int64_t kChunkAtoms = 64 * kWordAtoms;  // that fit the first-level cache

  explicit DeltaPiece(const RouteRegion& what);

  int64_t atoms() const { return atoms_; }
  int64_t atom_bytes() const { return atom_bytes_; }
  int64_t full_bytes() const { return atoms_ * atom_bytes_; }  // of the whole route, without a delta
  int64_t bytes() const { return values_ + full_bytes(); }     // size of the piece
  int64_t head_bytes() const { return values_; }               // all but the values

  int64_t segments() const { return (atoms_ + kSegmentAtoms - 1) / kSegmentAtoms; }
  int64_t first_atom(int64_t segment) const { return segment * kSegmentAtoms; }
  int64_t segment_atoms(int64_t segment) const { return std::min(kSegmentAtoms, atoms_ - first_atom(segment)); }
  // Offsets in the piece.
  int64_t count(int64_t segment) const { return segment * static_cast<int64_t>(sizeof(uint32_t)); }
  int64_t summaries(int64_t segment) const { return summaries_ + first_atom(segment) / kChunkAtoms * kWordBytes; }
  int64_t words(int64_t segment) const { return words_ + first_atom(segment) / kWordAtoms * kWordBytes; }
  int64_t values(int64_t segment) const { return values_ + first_atom(segment) * atom_bytes_; }

  int64_t summary_bytes(int64_t segment) const {
    return (segment_atoms(segment) + kChunkAtoms - 1) / kChunkAtoms * kWordBytes;
  }
  // The bytes that are read for a segment with `changed` changed atoms, in `words` words of the bitmap.
  int64_t read_bytes(int64_t segment, int64_t words, int64_t changed) const {
    return changed == 0 ? 0 : summary_bytes(segment) + words * kWordBytes + changed * atom_bytes_;
  }
  int64_t count_bytes() const { return segments() * static_cast<int64_t>(sizeof(uint32_t)); }  // of all segments

 private:
  static constexpr int64_t kWordBytes = sizeof(uint64_t);

  int64_t atoms_ = 0;
  int64_t atom_bytes_ = 1;
  int64_t summaries_ = 0;  // where the sections begin
  int64_t words_ = 0;
  int64_t values_ = 0;
};

// The data of one segment, in a piece or packed.
struct DeltaSegment {
  uint32_t count = 0;
  const std::byte* summaries = nullptr;
  const std::byte* words = nullptr;
  const std::byte* values = nullptr;

  static DeltaSegment of_piece(const DeltaPiece& piece, const std::byte* from, int64_t segment);
};

// The bits that the first `atoms` of a chunk have in its summary.
inline uint64_t summary_mask(int64_t atoms) {
  const int64_t words = (atoms + DeltaPiece::kWordAtoms - 1) / DeltaPiece::kWordAtoms;
  return words == 64 ? UINT64_MAX : (uint64_t{1} << words) - 1;
}

// The number of bitmap words that these summaries of a segment stand for. Bits beyond the last atom do not count.
int64_t bitmap_words(const DeltaPiece& piece, int64_t segment, const std::byte* summaries);

// For cut_into_units(): in segments.
PartSize delta_part_size(const DeltaPiece& piece);

}  // namespace tessera
