#include "codec/row_coder.h"

#include <algorithm>
#include <cstring>

#include "codec/cast.h"
#include "codec/matrix.h"
#include "codec/transpose.h"

namespace tessera::codec {
RowCoder::RowCoder(const QuantSpec& spec, float amax, DType input, const DrawRows& draws, TileScratch& scratch)
    : kernels_(active_kernels()),
      spec_(spec),
      type_(index_of(input)),
      block_(block_shape(spec, Plane::kRow)),
      draws_(draws),
      scaler_(spec, amax, input),
      scratch_(scratch) {}

bool RowCoder::encode(const Rows& input, const PlaneMemory& to) {
  if (block_.columns == 0) return encode_whole(input, to);
  const size_t blocks = input.columns / static_cast<size_t>(block_.columns) + 1;
  if (scratch_.amax.size() < blocks) scratch_.amax.resize(blocks);
  if (scratch_.multipliers.size() < blocks) scratch_.multipliers.resize(blocks);
  return block_.rows == 1 ? encode_flat_blocks(input, to) : encode_high_blocks(input, to);
}

bool RowCoder::encode_whole(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  float amax = 0;
  for (size_t r = 0; r < input.rows; ++r) {
    const std::byte* row = input.data + r * input.stride;
    if (spec_.nonfinite == Nonfinite::kError) nonfinite |= kernels_.amax->row[type_](row, input.columns, amax);
    scaler_.encode()(row, input.columns, kWholeRow, &scaler_.whole().multiplier,
                     to.codes + static_cast<int64_t>(r) * to.code_stride);
  }
  return nonfinite;
}

bool RowCoder::encode_flat_blocks(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto block = static_cast<size_t>(block_.columns);
  for (size_t r = 0; r < input.rows; ++r) {
    nonfinite |=
        kernels_.amax->blocks[type_](input.data + r * input.stride, input.columns, block, scratch_.amax.data());
    scale_blocks((input.columns + block - 1) / block, to.scales + static_cast<int64_t>(r) * to.scale_stride);
    encode_row(input, r, block, to);
  }
  return nonfinite;
}

bool RowCoder::encode_high_blocks(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto block = static_cast<size_t>(block_.columns);
  const auto high = static_cast<size_t>(block_.rows);
  const size_t blocks = (input.columns + block - 1) / block;
  const bool repeated = spec_.format == Format::kNvfp4;  // a scale in each row of its block
  for (size_t first = 0; first < input.rows; first += high) {
    const size_t rows = std::min(high, input.rows - first);
    nonfinite |= fold(input, first, rows);
    kernels_.amax->blocks[type_](scratch_.magnitudes.data(), input.columns, block, scratch_.amax.data());
    std::byte* scales = to.scales + static_cast<int64_t>(repeated ? first : first / high) * to.scale_stride;
    scale_blocks(blocks, scales);
    for (size_t r = 0; r < rows; ++r) {
      if (repeated && r > 0) std::memcpy(scales + static_cast<int64_t>(r) * to.scale_stride, scales, blocks);
      encode_row(input, first + r, block, to);
    }
  }
  return nonfinite;
}

bool RowCoder::encode_columns(const Rows& input, const PlaneMemory& to) {
  bool nonfinite = false;
  const auto high = static_cast<size_t>(block_shape(spec_, Plane::kColumn).rows);
  if (scratch_.amax.size() < input.columns) scratch_.amax.resize(input.columns);
  if (scratch_.multipliers.size() < input.columns) scratch_.multipliers.resize(input.columns);
  for (size_t first = 0; first < input.rows; first += high) {
    const size_t rows = std::min(high, input.rows - first);
    nonfinite |= fold(input, first, rows);
    const float* amax = scratch_.magnitudes.data();
    if (input.dtype != DType::kF32) {
      cast_row(input.dtype, DType::kF32)(scratch_.magnitudes.data(), scratch_.amax.data(), input.columns);
      amax = scratch_.amax.data();
    }
    std::byte* scales = to.scales + static_cast<int64_t>(first / high) * to.scale_stride;
    scaler_.scale(amax, input.columns, scales, scratch_.multipliers.data());
    for (size_t r = 0; r < rows; ++r) encode_row(input, first + r, kEach, to);
  }
  return nonfinite;
}

void RowCoder::encode_row(const Rows& input, size_t row, size_t block, const PlaneMemory& to) {
  const std::byte* src = input.data + row * input.stride;
  std::byte* codes = to.codes + static_cast<int64_t>(row) * to.code_stride;
  if (spec_.rounding == Rounding::kNearest) {
    scaler_.encode()(src, input.columns, block, scratch_.multipliers.data(), codes);
    return;
  }
  Draw draw = draws_.first;
  draw.first_element += row * draws_.step;
  kernels_.quantize->encode_stochastic[type_](src, input.columns, block, scratch_.multipliers.data(), draw, codes);
}

void RowCoder::scale_blocks(size_t n, std::byte* scales) {
  scaler_.scale(scratch_.amax.data(), n, scales, scratch_.multipliers.data());
}

// To scratch_.magnitudes: element by element, the largest of some rows.
bool RowCoder::fold(const Rows& input, size_t first, size_t rows) {
  if (scratch_.magnitudes.size() < input.columns) scratch_.magnitudes.resize(input.columns);
  return kernels_.amax->fold[type_](input.data + first * input.stride, input.stride, rows, input.columns,
                                    scratch_.magnitudes.data());
}

namespace {

// Of square blocks: bytes stand in each of a block's rows, floats once.
template <typename T>
void transpose_scales(BlockShape block, int64_t rows, int64_t columns, const ConstPlaneMemory& from,
                      const PlaneMemory& to) {
  constexpr bool kRepeated = sizeof(T) == 1;
  for (int64_t c = 0; c < columns; c += kRepeated ? 1 : block.columns) {
    std::byte* scales = to.scales + (kRepeated ? c : c / block.columns) * to.scale_stride;
    const std::byte* line = from.scales + c / block.columns * static_cast<int64_t>(sizeof(T));
    const int64_t step = (kRepeated ? block.rows : 1) * from.scale_stride;
    for (int64_t r = 0; r < rows; r += block.rows, line += step, scales += sizeof(T))
      std::memcpy(scales, line, sizeof(T));
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
