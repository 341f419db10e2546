// From a wire piece into planes of a quantised tensor: codes, scales and amaxes as they travel, or transposed.
//
// A piece may hold only parts of a block. All pieces that a receiver takes together hold each block of what it holds
// whole; of them, the one with the block's first element writes its scale. A byte of f4 may hold codes of two pieces,
// which different threads write: each changes its own nibble, atomically.
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
  // `held`: the elements that the planes are of, in the tensor that travels. REQUIRES: it owns the piece's region, its
  // edges cut no block, and the piece is no part of a fused matrix.
  PlaneWriter(std::shared_ptr<const WirePiece> piece, const Region& held, std::span<const PlaneTarget> planes);

  int64_t band_bytes() const override;
  Index bands_at_once() const override;

 private:
  // Touched blocks along one dim whose scales are written here.
  struct Block {
    Index place = 0;  // in the piece's grid
    Index local = 0;  // among the blocks of what is held
    Index lines = 1;  // elements along the dim, where a scale stands for each of them
  };
  struct Plane {
    PlaneTarget target;
    BoxOffsets codes;           // in elements
    int64_t code_row_elements;  // from one row, transposed: column, to the next
    int64_t scale_row_bytes;    // likewise
    int64_t scale_matrix_bytes;
  };

  int64_t read_matrix(const std::byte* from, Index matrix, const Interval& bands) const override;
  void copy_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const;
  void transpose_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const;
  void write_scales(const std::byte* from, const Plane& plane, Index matrix, const Interval& places) const;

  std::vector<Plane> planes_;
  BoxOffsets matrices_;  // of what is held
  std::vector<Block> block_rows_, block_columns_;
};

}  // namespace tessera
