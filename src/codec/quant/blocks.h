// Quantises parts of matrices as quantize() and dequantize() (tessera/quantize.h) do whole ones: boxes of rows and
// columns that begin and end anywhere, inside a block or between the two codes of a byte. Row planes only, rounded to
// nearest. All boxes of a matrix together give the bits of the whole, provided that they use the same amaxes of the
// blocks, and of the matrix if the format needs it (needs_amax()):
//
//   add_block_amaxes(format, box, grid, ...)            1. a grid of block amaxes grows, box by box
//   BlockEncoder::scales(), codes()                     2. from the grid, for any boxes
//   BlockDecoder::decode()                              3. from codes and scales
//
// A grid, and the scales made from it, have one entry for each block: a 16x16 block of nvfp4 has one, not one in each
// row. Nothing is checked and nothing is allocated; NaN and infinity go through the formulas. Thread-compatible.
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
  // Bits of 256 elements in whole blocks, including scales, rounded up.
  int64_t bits_of_256() const;

  QuantSpec spec;
  DType codes = DType::kF8E4M3;
  DType scales = DType::kF32;
  int64_t block_rows = 1;
  int64_t block_columns = 1;
};

// Rows and columns of a matrix of f64, f32, f16 or bf16; strides in bytes, of any sign. An f64 counts as its value
// rounded to f32.
template <typename Byte>
struct MatrixBox {
  Byte* data = nullptr;  // the first element
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  // The position of the first element in the matrix whose blocks are counted.
  int64_t row = 0;
  int64_t column = 0;
};
using SourceBox = MatrixBox<const std::byte>;
using TargetBox = MatrixBox<std::byte>;

// A number for each block that a box touches, starting with the first one; block rows are `stride` entries apart.
template <typename Entry>
struct BlockGrid {
  Entry* first = nullptr;
  int64_t stride = 0;
};

// The codes of a box. For f4, `odd` means that the first column's codes are high nibbles, whose low nibbles belong to
// another box.
template <typename Byte>
struct CodeRows {
  Byte* codes = nullptr;  // the byte with the first code
  int64_t row_bytes = 0;
  bool odd = false;
};

// The number of NaNs and infinities, and the first one's position in the box, row-major.
struct NonfiniteElements {
  int64_t count = 0;
  int64_t row = -1;
  int64_t column = -1;
  float value = 0;
};

// Raises entries of the grid to the largest |x| of the box's elements in their block. Ignores NaN.
void add_block_amaxes(const BlockFormat& format, const SourceBox& box, const BlockGrid<float>& grid,
                      NonfiniteElements& found);

class BlockEncoder {
 public:
  // `input`: the matrix's dtype; FP8 blocks depend on its range.
  BlockEncoder(const BlockFormat& format, DType input);

  const BlockFormat& format() const { return format_; }

  // For n blocks, scale_bytes() each. `amax`: the matrix's.
  void scales(float amax, const float* block_amaxes, int64_t n, std::byte* scales) const;

  // Writes all bytes that hold codes of the box; nibbles of other boxes become 0. REQUIRES: the box has the encoder's
  // dtype.
  void codes(float amax, const SourceBox& box, const BlockGrid<const float>& grid, const CodeRows<std::byte>& to) const;

 private:
  class Job;

  BlockFormat format_;
  DType input_;  // f64 as f32
};

class BlockDecoder {
 public:
  explicit BlockDecoder(const BlockFormat& format, float amax = 0);

  // Decodes into f64, f32, f16 or bf16, computed in f32 and rounded once. `scales`: scale_bytes() for each block; their
  // stride counts bytes.
  void decode(const CodeRows<const std::byte>& from, const BlockGrid<const std::byte>& scales,
              const TargetBox& to) const;

 private:
  class Job;

  BlockFormat format_;
  size_t code_;
  std::array<float, 256> table_{};  // multipliers by scale byte
};

}  // namespace tessera::codec
