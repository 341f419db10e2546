// Scales and codes of rows, whose blocks lie along them. A column plane is the same of a transposed input, but for
// MXFP8's, whose blocks stand upright.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/block_scaler.h"
#include "codec/hadamard.h"
#include "codec/kernel_set.h"
#include "codec/tile.h"

namespace tessera::codec {

struct Rows {
  const std::byte* data;
  size_t stride;  // bytes
  size_t rows;
  size_t columns;
  DType dtype;
};

// Where stochastic rounding draws for the first row, and how much further for each next one.
struct DrawRows {
  Draw first{};
  uint64_t step = 0;
};

class RowCoder {
 public:
  // `amax`: the whole tensor's, for the formats that need it.
  RowCoder(const QuantSpec& spec, float amax, DType input, const DrawRows& draws, TileScratch& scratch);

  // To codes and scales at `to`; a format's one scale is not written. True if there was a NaN or an infinity.
  bool encode(const Rows& input, const PlaneMemory& to);
  // Of MXFP8: blocks of 32 rows by one column.
  bool encode_columns(const Rows& input, const PlaneMemory& to);

 private:
  bool encode_whole(const Rows& input, const PlaneMemory& to);
  bool encode_flat_blocks(const Rows& input, const PlaneMemory& to);
  bool encode_high_blocks(const Rows& input, const PlaneMemory& to);
  void encode_row(const Rows& input, size_t row, size_t block, const PlaneMemory& to);
  void scale_blocks(size_t n, std::byte* scales);
  bool fold(const Rows& input, size_t first, size_t rows);

  const KernelSet& kernels_;
  const QuantSpec& spec_;
  const size_t type_;
  const BlockShape block_;
  const DrawRows draws_;
  const BlockScaler scaler_;
  TileScratch& scratch_;
};

// Codes and scales of a row plane that begins at whole blocks, to where its transpose begins in the column plane.
void transpose_codes_and_scales(const QuantSpec& spec, int64_t rows, int64_t columns, const ConstPlaneMemory& from,
                                const PlaneMemory& to);

}  // namespace tessera::codec
