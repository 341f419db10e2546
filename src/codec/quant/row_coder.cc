#include "codec/quant/row_coder.h"

#include <algorithm>
#include <cstring>

#include "codec/quant/matrix.h"
#include "codec/simd/cast.h"
#include "codec/simd/transpose.h"

namespace tessera::codec {
RowCoder::RowCoder(const QuantSpec& spec, float amax, DType input, const DrawRows& draws, TileScratch& scratch)
    : kernels_(active_kernels()),
      spec_(spec),
      type_(index_of(input)),
      element_(static_cast<size_t>(bytes_of(input, 1))),
      unit_(plane_shape(spec, Plane::kRow, 0, 0)),
      block_(block_shape(spec, Plane::kRow)),
      draws_(draws),
      scaler_(spec, amax, input),
      scratch_(scratch) {}

namespace {

uintptr_t address(const std::byte* p) {
  return reinterpret_cast<uintptr_t>(p);
}

}  // namespace

template <typename Body>
void RowCoder::for_each_piece(const Rows& input, size_t high, const Body& body) const {
  for (size_t row = 0; row < input.rows; row += high) {
    const size_t rows = std::min(high, input.rows - row);
    const std::byte* first = input.data + row * input.stride;
    for (size_t column = 0; column < input.columns; column += kPieceColumns) {
      const size_t columns = std::min(kPieceColumns, input.columns - column);
      const std::byte* src = first + column * element_;
      const bool last = column + columns == input.columns;
      const uintptr_t next = last ? address(first) + rows * input.stride : address(src + columns * element_);
      body(Piece{.src = src, .next = next, .row = row, .rows = rows, .column = column, .columns = columns});
    }
  }
}

// Prefetches row `row` of the next piece.
void RowCoder::prefetch_next(const Rows& input, const Piece& piece, size_t row) const {
  constexpr size_t kLine = 64;
  const uintptr_t src = piece.next + row * input.stride;
  for (size_t i = 0; i < piece.columns * element_; i += kLine)
    __builtin_prefetch(reinterpret_cast<const void*>(src + i));
}

bool RowCoder::encode(const Rows& input, const PlaneMemory& to) {
  if (block_.columns == 0) return encode_whole(input, to);
  return block_.rows == 1 ? encode_flat_blocks(input, to) : encode_high_blocks(input, to);
}

bool RowCoder::encode_whole(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  float amax = 0;
  for_each_piece(input, 1, [&](const Piece& piece) {
    prefetch_next(input, piece, 0);
    if (spec_.nonfinite == Nonfinite::kError) nonfinite |= kernels_.amax->row[type_](piece.src, piece.columns, amax);
    scaler_.encode()(piece.src, piece.columns, kWholeRow, &scaler_.whole().multiplier,
                     codes_at(to, piece.row, piece.column));
  });
  return nonfinite;
}

bool RowCoder::encode_flat_blocks(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto block = static_cast<size_t>(block_.columns);
  for_each_piece(input, 1, [&](const Piece& piece) {
    prefetch_next(input, piece, 0);
    nonfinite |= kernels_.amax->blocks[type_](piece.src, piece.columns, block, scratch_.amax.data());
    scale_blocks((piece.columns + block - 1) / block, scales_at(to, piece.row, piece.column));
    encode_row(piece.src, piece.row, piece.column, piece.columns, block, to);
  });
  return nonfinite;
}

bool RowCoder::encode_high_blocks(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto block = static_cast<size_t>(block_.columns);
  const auto high = static_cast<size_t>(block_.rows);
  const bool repeated = spec_.format == Format::kNvfp4;  // a scale in each row of its block
  for_each_piece(input, high, [&](const Piece& piece) {
    const size_t blocks = (piece.columns + block - 1) / block;
    nonfinite |= fold(input, piece);
    kernels_.amax->blocks[type_](scratch_.magnitudes.data(), piece.columns, block, scratch_.amax.data());
    std::byte* scales = scales_at(to, repeated ? piece.row : piece.row / high, piece.column);
    scale_blocks(blocks, scales);
    for (size_t r = 0; r < piece.rows; ++r) {
      prefetch_next(input, piece, r);
      if (repeated && r > 0) std::memcpy(scales + static_cast<int64_t>(r) * to.scale_stride, scales, blocks);
      encode_row(piece.src + r * input.stride, piece.row + r, piece.column, piece.columns, block, to);
    }
  });
  return nonfinite;
}

bool RowCoder::encode_columns(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto high = static_cast<size_t>(block_shape(spec_, Plane::kColumn).rows);
  const auto encode = kernels_.quantize->encode_columns[type_][code_index(unit_.code_dtype)];
  for_each_piece(input, high, [&](const Piece& piece) {
    nonfinite |= fold(input, piece);
    const float* amax = scratch_.magnitudes.data();
    if (input.dtype != DType::kF32) {
      cast_row(input.dtype, DType::kF32)(scratch_.magnitudes.data(), scratch_.amax.data(), piece.columns);
      amax = scratch_.amax.data();
    }
    std::byte* scales = to.scales + static_cast<int64_t>(piece.row / high) * to.scale_stride + piece.column;
    scaler_.scale(amax, piece.columns, scales, scratch_.multipliers.data());
    encode(piece.src, input.stride, piece.rows, piece.columns, scratch_.multipliers.data(),
           codes_at(to, piece.row, piece.column), to.code_stride);
  });
  return nonfinite;
}

void RowCoder::encode_row(const std::byte* src, size_t row, size_t column, size_t columns, size_t block,
                          const PlaneMemory& to) {
  std::byte* codes = codes_at(to, row, column);
  if (spec_.rounding == Rounding::kNearest) {
    scaler_.encode()(src, columns, block, scratch_.multipliers.data(), codes);
    return;
  }
  Draw draw = draws_.first;
  draw.first_element += row * draws_.step + column;
  kernels_.quantize->encode_stochastic[type_](src, columns, block, scratch_.multipliers.data(), draw, codes);
}

std::byte* RowCoder::codes_at(const PlaneMemory& to, size_t row, size_t column) const {
  return to.codes + static_cast<int64_t>(row) * to.code_stride +
         bytes_of(unit_.code_dtype, static_cast<int64_t>(column));
}

std::byte* RowCoder::scales_at(const PlaneMemory& to, size_t row, size_t column) const {
  return to.scales + static_cast<int64_t>(row) * to.scale_stride +
         bytes_of(unit_.scale_dtype, static_cast<int64_t>(column) / block_.columns);
}

void RowCoder::scale_blocks(size_t n, std::byte* scales) {
  scaler_.scale(scratch_.amax.data(), n, scales, scratch_.multipliers.data());
}

// To scratch_.magnitudes: element by element, the largest over a piece's rows.
bool RowCoder::fold(const Rows& input, const Piece& piece) {
  constexpr size_t kRows = 8;  // with more concurrent streams, reading is slower
  std::memset(scratch_.magnitudes.data(), 0, piece.columns * element_);
  bool nonfinite = false;
  for (size_t r = 0; r < piece.rows; r += kRows)
    nonfinite |= kernels_.amax->fold[type_](piece.src + r * input.stride, input.stride, std::min(kRows, piece.rows - r),
                                            piece.columns, scratch_.magnitudes.data());
  return nonfinite;
}

namespace {

// For square blocks: byte scales are repeated in each of a block's rows, float scales are not.
template <typename T>
void transpose_scales(BlockShape block, int64_t rows, int64_t columns, const ConstPlaneMemory& from,
                      const PlaneMemory& to) {
  constexpr bool kRepeated = sizeof(T) == 1;
  const auto bytes = static_cast<int64_t>(sizeof(T));
  const auto row_bytes = static_cast<size_t>((rows + block.rows - 1) / block.rows * bytes);
  const int64_t step = (kRepeated ? block.rows : 1) * from.scale_stride;
  for (int64_t c = 0; c < columns; c += block.columns) {
    const std::byte* line = from.scales + c / block.columns * bytes;
    std::byte* first = to.scales + (kRepeated ? c : c / block.columns) * to.scale_stride;
    for (std::byte* scale = first; scale < first + row_bytes; scale += bytes, line += step)
      std::memcpy(scale, line, sizeof(T));
    if (!kRepeated) continue;
    for (int64_t i = 1; i < std::min(block.columns, columns - c); ++i)
      std::memcpy(first + i * to.scale_stride, first, row_bytes);
  }
}

}  // namespace

void transpose_codes(DType codes, const std::byte* from, int64_t from_stride, int64_t rows, int64_t columns,
                     std::byte* to, int64_t to_stride) noexcept {
  const TransposeKernels& kernels = *active_kernels().transpose;
  (codes == DType::kF4 ? kernels.nibbles : kernels.elements[0])(from, static_cast<size_t>(from_stride),
                                                                static_cast<size_t>(rows), static_cast<size_t>(columns),
                                                                to, static_cast<size_t>(to_stride));
}

void transpose_codes_and_scales(const QuantSpec& spec, int64_t rows, int64_t columns, const ConstPlaneMemory& from,
                                const PlaneMemory& to) {
  const bool packed = spec.format == Format::kNvfp4;
  transpose_codes(packed ? DType::kF4 : DType::kF8E4M3, from.codes, from.code_stride, rows, columns, to.codes,
                  to.code_stride);
  const BlockShape block = block_shape(spec, Plane::kRow);
  if (block.columns == 0) return;
  (packed ? transpose_scales<std::byte> : transpose_scales<float>)(block, rows, columns, from, to);
}

}  // namespace tessera::codec
