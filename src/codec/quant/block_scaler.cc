#include "codec/quant/block_scaler.h"

#include <cmath>
#include <cstring>

#include "codec/quant/matrix.h"

namespace tessera::codec {
namespace {

float largest_code(DType codes) {
  return codes == DType::kF8E5M2 ? kLargestE5M2 : kLargestE4M3;
}

float largest_input(DType input) {
  constexpr float kLargestF16 = 65504;
  if (input == DType::kF16) return kLargestF16;
  return input == DType::kBF16 ? f32_from_bf16(0x7F7F) : kLargestF32;
}

bool in_blocks(const QuantSpec& spec) {
  return block_shape(spec, Plane::kRow).columns != 0;
}

EncodeRow encode_kernel(const QuantSpec& spec, DType input) {
  const QuantizeKernels& kernels = *active_kernels().quantize;
  const bool powers = spec.format != Format::kNvfp4 && spec.power_of_two.value_or(in_blocks(spec));
  const auto& table = powers ? kernels.encode_by_powers : kernels.encode;
  return table[index_of(input)][code_index(plane_shape(spec, Plane::kRow, 0, 0).code_dtype)];
}

}  // namespace

BlockScaler::BlockScaler(const QuantSpec& spec, float amax, DType input)
    : kernels_(*active_kernels().scale), nv_(spec.format == Format::kNvfp4), encode_(encode_kernel(spec, input)) {
  const PlaneShape shape = plane_shape(spec, Plane::kRow, 0, 0);
  const float largest = largest_code(shape.code_dtype);
  if (nv_) {
    nv_constants_ = nv_constants(amax);
  } else if (shape.scale_dtype == DType::kF8E8M0) {
    mx_reciprocal_ = 1.0F / largest;
  } else {
    fp8_ = {.largest = std::ldexp(largest, -spec.margin),
            .eps = spec.eps,
            .overflow = in_blocks(spec) ? largest_input(input) : kLargestF32,
            .power_of_two = spec.power_of_two.value_or(in_blocks(spec))};
    if (!in_blocks(spec)) whole_ = fp8_scale(amax, fp8_);
  }
}

void BlockScaler::scale(const float* amaxes, size_t n, std::byte* scales, float* multipliers) const noexcept {
  auto* bytes = reinterpret_cast<uint8_t*>(scales);
  if (nv_) return kernels_.nv(amaxes, n, nv_constants_, bytes, multipliers);
  if (mx_reciprocal_ != 0) return kernels_.mx(amaxes, n, mx_reciprocal_, bytes, multipliers);
  for (size_t b = 0; b < n; ++b) {
    const auto scale = fp8_scale(amaxes[b], fp8_);
    std::memcpy(scales + b * sizeof(float), &scale.stored, sizeof(float));
    multipliers[b] = scale.multiplier;
  }
}

namespace {

std::array<float, 256> values_of(float (*decode)(uint8_t)) {
  std::array<float, 256> values;
  for (size_t code = 0; code < values.size(); ++code) values[code] = decode(static_cast<uint8_t>(code));
  return values;
}

}  // namespace

std::array<float, 256> scale_table(Format format, float amax) {
  static const auto e8m0 = values_of(f32_from_e8m0);
  static const auto e4m3 = values_of(f32_from_e4m3);
  if (format != Format::kNvfp4) return e8m0;
  std::array<float, 256> table;
  for (size_t code = 0; code < table.size(); ++code) table[code] = nv_dequantizer(e4m3[code], amax);
  return table;
}

}  // namespace tessera::codec
