#include "codec/row_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/cast.h"
#include "codec/matrix.h"
#include "codec/transpose.h"

namespace tessera::codec {
namespace {

float largest_of(DType codes) {
  return codes == DType::kF8E5M2 ? kLargestE5M2 : kLargestE4M3;
}

float largest_input(DType input) {
  constexpr float kLargestF16 = 65504;
  if (input == DType::kF16) return kLargestF16;
  return input == DType::kBF16 ? f32_from_bf16(0x7F7F) : kLargestF32;
}

size_t code_index(Format format) {
  switch (format) {
    case Format::kNvfp4:
      return 2;
    case Format::kFp8E5M2:
    case Format::kMxfp8E5M2:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

Fp8Constants fp8_constants(const QuantSpec& spec, DType input) {
  const bool blocks = block_shape(spec, Plane::kRow).columns != 0;
  return {.largest = std::ldexp(largest_of(plane_shape(spec, Plane::kRow, 0, 0).code_dtype), -spec.margin),
          .eps = spec.eps,
          .overflow = blocks ? largest_input(input) : kLargestF32,
          .power_of_two = spec.power_of_two.value_or(blocks)};
}

namespace {

bool scales_are_powers(const QuantSpec& spec) {
  const bool blocks = block_shape(spec, Plane::kRow).columns != 0;
  return spec.format != Format::kNvfp4 && spec.power_of_two.value_or(blocks);
}

}  // namespace

RowCoder::RowCoder(const QuantSpec& spec, float amax, DType input, const DrawRows& draws, TileScratch& scratch)
    : kernels_(active_kernels()),
      spec_(spec),
      type_(index_of(input)),
      code_(code_index(spec.format)),
      block_(block_shape(spec, Plane::kRow)),
      draws_(draws),
      encode_(
          (scales_are_powers(spec) ? kernels_.quantize->encode_by_powers : kernels_.quantize->encode)[type_][code_]),
      scratch_(scratch) {
  switch (spec.format) {
    case Format::kNvfp4:
      nv_ = nv_constants(amax);
      break;
    case Format::kMxfp8:
      mx_reciprocal_ = 1.0F / kLargestE4M3;
      break;
    case Format::kMxfp8E5M2:
      mx_reciprocal_ = 1.0F / kLargestE5M2;
      break;
    default:
      fp8_ = fp8_constants(spec, input);
      if (block_.columns == 0) whole_ = fp8_scale(amax, fp8_).multiplier;
  }
}

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
    encode_(row, input.columns, kWholeRow, &whole_, to.codes + static_cast<int64_t>(r) * to.code_stride);
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
    kernels_.scale->mx(amax, input.columns, mx_reciprocal_, reinterpret_cast<uint8_t*>(scales),
                       scratch_.multipliers.data());
    for (size_t r = 0; r < rows; ++r) encode_row(input, first + r, kEach, to);
  }
  return nonfinite;
}

void RowCoder::encode_row(const Rows& input, size_t row, size_t block, const PlaneMemory& to) {
  const std::byte* src = input.data + row * input.stride;
  std::byte* codes = to.codes + static_cast<int64_t>(row) * to.code_stride;
  if (spec_.rounding == Rounding::kNearest) {
    encode_(src, input.columns, block, scratch_.multipliers.data(), codes);
    return;
  }
  Draw draw = draws_.first;
  draw.first_element += row * draws_.step;
  kernels_.quantize->encode_stochastic[type_](src, input.columns, block, scratch_.multipliers.data(), draw, codes);
}

void RowCoder::scale_blocks(size_t n, std::byte* scales) {
  const float* amax = scratch_.amax.data();
  float* multipliers = scratch_.multipliers.data();
  auto* bytes = reinterpret_cast<uint8_t*>(scales);
  if (spec_.format == Format::kNvfp4) {
    kernels_.scale->nv(amax, n, nv_, bytes, multipliers);
  } else if (mx_reciprocal_ != 0) {
    kernels_.scale->mx(amax, n, mx_reciprocal_, bytes, multipliers);
  } else {
    for (size_t b = 0; b < n; ++b) {
      const auto scale = fp8_scale(amax[b], fp8_);
      std::memcpy(scales + b * sizeof(float), &scale.stored, sizeof(float));
      multipliers[b] = scale.multiplier;
    }
  }
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
