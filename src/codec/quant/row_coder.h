// Scales and codes of rows whose blocks run along them. A column plane is the same for a transposed input, except
// MXFP8's, whose blocks run across rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/quant/block_scaler.h"
#include "codec/quant/hadamard.h"
#include "codec/quant/tile.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {

struct Rows {
  const std::byte* data;
  size_t stride;  // bytes
  size_t rows;
  size_t columns;
  DType dtype;
};

// Where stochastic rounding draws for the first row, and the distance to each next one.
struct DrawRows {
  Draw first{};
  uint64_t step = 0;
};

class RowCoder {
 public:
  // `amax`: the whole tensor's, for formats that need it.
  RowCoder(const QuantSpec& spec, float amax, DType input, const DrawRows& draws, TileScratch& scratch);

  // Writes codes and scales to `to`, except the scale of a format with only one. True if there was a NaN or an
  // infinity.
  bool encode(const Rows& input, const PlaneMemory& to);
  // For MXFP8: blocks of 32 rows by one column.
  bool encode_columns(const Rows& input, const PlaneMemory& to);

 private:
  bool encode_whole(const Rows& input, const PlaneMemory& to);
  bool encode_flat_blocks(const Rows& input, const PlaneMemory& to);
  bool encode_high_blocks(const Rows& input, const PlaneMemory& to);
  // At most kPieceColumns of as many rows as a block is high: the amount that passes through the caches at a time,
  // while the next piece is prefetched.
  struct Piece {
    const std::byte* src;
    uintptr_t next;  // where the next piece begins; may be invalid
    size_t row;
    size_t rows;
    size_t column;
    size_t columns;
  };
  template <typename Body>
  void for_each_piece(const Rows& input, size_t high, const Body& body) const;
  void prefetch_next(const Rows& input, const Piece& piece, size_t row) const;
  void encode_row(const std::byte* src, size_t row, size_t column, size_t columns, size_t block, const PlaneMemory& to);
  std::byte* codes_at(const PlaneMemory& to, size_t row, size_t column) const;
  std::byte* scales_at(const PlaneMemory& to, size_t row, size_t column) const;
  void scale_blocks(size_t n, std::byte* scales);
  bool fold(const Rows& input, const Piece& piece);

  const KernelSet& kernels_;
  const QuantSpec& spec_;
  const size_t type_;
  const size_t element_;  // bytes
  const PlaneShape unit_;
  const BlockShape block_;
  const DrawRows draws_;
  const BlockScaler scaler_;
  TileScratch& scratch_;
};

// Transposes codes and scales of a row plane that begins at whole blocks, to where its transpose begins in the column
// plane.
void transpose_codes_and_scales(const QuantSpec& spec, int64_t rows, int64_t columns, const ConstPlaneMemory& from,
                                const PlaneMemory& to);

}  // namespace tessera::codec
