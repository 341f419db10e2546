// Parts of quantised matrices: what quantize() and dequantize() (tessera/quantize.h) do to a whole one, for boxes of
// rows and columns that begin and end anywhere, inside a block or between the two codes of a byte. Row planes only,
// rounded to nearest. All boxes of a matrix together give the bits of the whole, provided that all agree on the amaxes
// of the blocks, and of the matrix where the format asks for it (needs_amax()):
//
//   add_block_amaxes(format, box, grid, ...)            1. a grid of block amaxes grows, box by box
//   BlockEncoder::scales(), codes()                     2. from the grid, and anywhere else
//   BlockDecoder::decode()                              3. from codes and scales
//
// A grid, and the scales made from it, have one entry a block: a 16x16 block of nvfp4 has one, not one in each row.
// Nothing is checked, nothing allocated; NaN and infinity go through the formulas. Thread-compatible.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tessera/quantize.h"

namespace tessera::codec {

struct BlockFormat {
  static constexpr int64_t kAll = int64_t{1} << 62;  // of a format with one scale: all rows, all columns

  explicit BlockFormat(Format format, NvScaling scaling = NvScaling::k16x16);

  bool one_scale() const { return block_columns == kAll; }
  bool packed() const { return codes == DType::kF4; }
  int64_t scale_bytes() const { return bytes_of(scales, 1); }
  // Bits of 256 elements in whole blocks, scales included, rounded up.
  int64_t bits_of_256() const;

  QuantSpec spec;
  DType codes = DType::kF8E4M3;
  DType scales = DType::kF32;
  int64_t block_rows = 1;
  int64_t block_columns = 1;
};

// Rows and columns of a matrix of f64, f32, f16 or bf16; strides in bytes, of any sign. An f64 counts as what it is
// when rounded to f32.
template <typename Byte>
struct MatrixBox {
  Byte* data = nullptr;  // the first element
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  // Where the first element stands in the matrix whose blocks are counted.
  int64_t row = 0;
  int64_t column = 0;
};
using SourceBox = MatrixBox<const std::byte>;
using TargetBox = MatrixBox<std::byte>;

// A number for each block that a box touches, from the first one on; block rows are `stride` entries apart.
template <typename Entry>
struct BlockGrid {
  Entry* first = nullptr;
  int64_t stride = 0;
};

// The codes of a box. Of f4, `odd` says that the first column's are high nibbles, whose low ones are another's.
template <typename Byte>
struct CodeRows {
  Byte* codes = nullptr;  // the byte that holds the first
  int64_t row_bytes = 0;
  bool odd = false;
};

// NaNs and infinities; the first one's place in the box, row-major.
struct NonfiniteElements {
  int64_t count = 0;
  int64_t row = -1;
  int64_t column = -1;
  float value = 0;
};

// Entries of the grid become at least the largest |x| of what the box holds of their block. NaN is none.
void add_block_amaxes(const BlockFormat& format, const SourceBox& box, const BlockGrid<float>& grid,
                      NonfiniteElements& found);

class BlockEncoder {
 public:
  // `input`: the matrix's dtype; blocks of FP8 ask how far it reaches.
  BlockEncoder(const BlockFormat& format, DType input);

  const BlockFormat& format() const { return format_; }

  // Of n blocks, scale_bytes() each. `amax`: the matrix's.
  void scales(float amax, const float* block_amaxes, int64_t n, std::byte* scales) const;

  // Writes all bytes that hold codes of the box; a nibble that is not the box's becomes 0. REQUIRES: the box is of the
  // encoder's dtype.
  void codes(float amax, const SourceBox& box, const BlockGrid<const float>& grid, const CodeRows<std::byte>& to) const;

 private:
  class Job;

  BlockFormat format_;
  DType input_;  // f64 as f32
};

class BlockDecoder {
 public:
  explicit BlockDecoder(const BlockFormat& format, float amax = 0);

  // Into f64, f32, f16 or bf16, computed in f32 and rounded once. `scales`: a block's scale_bytes(); its stride counts
  // bytes.
  void decode(const CodeRows<const std::byte>& from, const BlockGrid<const std::byte>& scales,
              const TargetBox& to) const;

 private:
  class Job;

  BlockFormat format_;
  size_t code_;
  std::array<float, 256> table_{};  // multipliers by scale byte
};

}  // namespace tessera::codec
