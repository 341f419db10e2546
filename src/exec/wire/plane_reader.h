// The sender's side of a route whose tensor is quantised already: fills a wire piece with codes, scales and amaxes of a
// plane, as they are. The inverse of exec/wire/plane_writer.h.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "exec/wire/wire_piece.h"

namespace tessera {

// A plane of a quantised tensor (tessera/quantize.h) that pieces are filled from, as far as the sender holds it: codes
// and scales of what travels, or of its transpose.
struct PlaneSource {
  struct Matrix {
    const std::byte* codes = nullptr;
    const std::byte* scales = nullptr;
    const std::byte* amax = nullptr;  // f32; null if the format needs none
  };
  bool transposed = false;
  Region held{};                   // in the tensor that travels; its edges cut no block
  std::vector<Matrix> matrices{};  // those held, row-major over the stack
};

// Immutable, hence thread-safe.
class PlaneReader {
 public:
  // REQUIRES: the plane holds the piece's region, which is not part of a fused matrix.
  PlaneReader(const WirePiece& piece, const PlaneSource& plane);

  // The place among PlaneSource::matrices of one of the piece's.
  size_t held_matrix(Index matrix) const { return static_cast<size_t>(matrices_.of_matrix(matrix)); }

  // Writes bands [first, last) of the piece at `to`; returns the number of elements. `matrices` are those of such a
  // plane, perhaps at another place. REQUIRES: `piece` is equal to the constructor's.
  Index read(const WirePiece& piece, std::span<const PlaneSource::Matrix> matrices, Index first, Index last,
             std::byte* to) const;

 private:
  void copy_codes(const WirePiece& piece, const std::byte* codes, const BlockBox& box, std::byte* to) const;
  void transpose_codes(const WirePiece& piece, const std::byte* codes, const BlockBox& box, std::byte* to) const;
  void copy_scales(const WirePiece& piece, const std::byte* scales, Index matrix, const Interval& places,
                   std::byte* to) const;

  bool transposed_;
  BoxOffsets codes_;     // in elements of one matrix
  BoxOffsets matrices_;  // of which only the stack counts
  int64_t code_row_elements_;
  int64_t scale_row_bytes_;
  // For the touched blocks of the piece's grid: their index among the held ones.
  std::vector<Index> block_rows_, block_columns_;
};

}  // namespace tessera
