// A quantised region of a tensor on the wire: a *wire piece*, whose layout both ends compute, so that it is never sent.
// For links and messages it is a one-dim tensor of u8.
//
//   amaxes   f32 [matrices]                                           for formats that need them
//   scales   [matrices][touched block rows][touched block columns]    one for each block
//   codes    [matrices][rows][row_bytes]
//
// Each section begins at a multiple of 16. A row's codes are those of its intervals of columns, one after another. For
// f4, an interval [b, e) takes the bytes b/2 to (e-1)/2 of the whole row, so that its codes have the same nibbles as
// there; a nibble of a column outside the region is 0.
//
// Its *image*, the subject of digests, does not depend on how the tensor is cut into regions: the codes of the whole
// tensor, packed, row-major; at the next multiple of 4 the scales of all its blocks [.., block rows, block columns]; at
// the next multiple of 4 the amaxes of its matrices. A block belongs to the region that *owns* it, the one with its
// first element of this tensor. Over all regions, the digests of codes and owned scales add up to the tensor's; the
// rest, scales of blocks owned elsewhere and amaxes, is compared but never summed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/simd/digest.h"
#include "exec/walk/block_walk.h"

namespace tessera {

// Immutable, hence thread-safe.
class WirePiece {
 public:
  // Throws as BlockWalk does.
  explicit WirePiece(const WireRegion& what);

  const WireRegion& what() const { return what_; }
  const BlockWalk& walk() const { return walk_; }
  int64_t bytes() const { return bytes_; }

  // Offsets in the piece.
  int64_t amax(Index matrix) const { return matrix * static_cast<int64_t>(sizeof(float)); }
  int64_t scale(Index matrix, Index block_row, Index block_column) const;  // places in the grid
  int64_t codes(const BlockBox& box) const;                                // of the byte with the first code

  int64_t scale_row_bytes() const { return walk_.block_columns().size() * what_.format.scale_bytes(); }
  int64_t row_bytes() const { return row_bytes_; }
  bool odd(const BlockBox& box) const { return what_.format.packed() && box.columns.begin % 2 != 0; }
  int64_t box_row_bytes(const BlockBox& box) const;
  int64_t code_section() const { return codes_; }
  // The index in the tensor, row-major over its stack, of one of the region's matrices.
  Index tensor_matrix(Index matrix) const;

  // Digests bands [first, last) of the piece at `data`: adds codes and owned scales, with the number of elements, to
  // `main`, and the scales of other blocks and the amaxes to `rest`.
  void digest(const std::byte* data, Index first, Index last, Digest& main, Digest& rest) const;

 private:
  // Touched blocks along one dim that are adjacent and alike.
  struct BlockRun {
    Interval places;     // in the grid
    uint64_t image = 0;  // of the first, among the tensor's
    bool owned = false;
  };
  // Blocks along one dim of a matrix.
  struct BlockDim {
    BlockDim() = default;
    BlockDim(const IntervalSet& touched, const IntervalSet& elements, Index size, Index origin, Index block);

    uint64_t count = 0;  // the number of the tensor's blocks
    std::vector<BlockRun> runs;
  };
  void digest_scales(const std::byte* data, Index matrix, const Interval& rows, Digest& main, Digest& rest) const;

  WireRegion what_;
  BlockWalk walk_;
  int64_t row_bytes_ = 0;
  int64_t scales_ = 0;  // where the sections begin
  int64_t codes_ = 0;
  int64_t bytes_ = 0;
  std::vector<int64_t> column_runs_;  // where the intervals of columns begin in a row

  BoxOffsets elements_;  // of boxes in the whole tensor
  BlockDim block_rows_, block_columns_;
  uint64_t image_scales_ = 0;  // where the sections begin in the image
  uint64_t image_amaxes_ = 0;
};

}  // namespace tessera
