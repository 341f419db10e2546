// Writes a wire piece into planes of a quantised tensor: codes, scales and amaxes as they travel, or transposed.
//
// A piece may hold only parts of a block. All pieces that a receiver takes together hold each of its blocks whole; the
// piece with a block's first element writes the block's scale. A byte of f4 may hold codes of two pieces, which
// different threads write: each changes its own nibble, atomically.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exec/walk/route.h"
#include "exec/wire/wire_reader.h"

namespace tessera {

class PlaneWriter final : public WireReader {
 public:
  // `held`: the region of the planes in the tensor that travels. REQUIRES: it owns the piece's region, its edges cut no
  // block, and the piece is not part of a fused matrix.
  PlaneWriter(std::shared_ptr<const WirePiece> piece, const Region& held, std::span<const PlaneTarget> planes);

  int64_t band_bytes() const override;
  Index bands_at_once() const override;

 private:
  // A touched block along one dim whose scale is written here.
  struct Block {
    Index place = 0;  // its place in the piece's grid
    Index local = 0;  // index among the held blocks
    Index lines = 1;  // elements along the dim, if each has a copy of the scale
  };
  struct Plane {
    PlaneTarget target;
    BoxOffsets codes;           // in elements
    int64_t code_row_elements;  // from one row (transposed: column) to the next
    int64_t scale_row_bytes;    // likewise
    int64_t scale_matrix_bytes;
  };

  int64_t read_matrix(const std::byte* from, Index matrix, const Interval& bands) const override;
  void copy_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const;
  void transpose_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const;
  void write_scales(const std::byte* from, const Plane& plane, Index matrix, const Interval& places) const;

  std::vector<Plane> planes_;
  BoxOffsets matrices_;  // of the held region
  std::vector<Block> block_rows_, block_columns_;
};

}  // namespace tessera
