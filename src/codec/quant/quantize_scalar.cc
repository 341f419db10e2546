// The reference for scales and codes: one element at a time.
#include <algorithm>
#include <type_traits>

#include "codec/float/float_types.h"
#include "codec/float/philox.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

void nv_scales(const float* amax, size_t n, const NvConstants& constants, uint8_t* scales, float* multipliers) {
  for (size_t b = 0; b < n; ++b) {
    const auto scale = nv_scale(amax[b], constants);
    scales[b] = scale.stored;
    multipliers[b] = scale.multiplier;
  }
}

void mx_scales(const float* amax, size_t n, float reciprocal, uint8_t* scales, float* multipliers) {
  for (size_t b = 0; b < n; ++b) {
    const auto scale = mx_scale(amax[b], reciprocal);
    scales[b] = scale.stored;
    multipliers[b] = scale.multiplier;
  }
}

template <typename Code>
inline constexpr bool kPacked = std::is_same_v<Code, E2M1>;

template <typename Code>
void store_code(std::byte* codes, size_t i, uint8_t code) {
  if constexpr (!kPacked<Code>) {
    codes[i] = std::byte{code};
  } else if (i % 2 == 0) {
    codes[i / 2] = std::byte{code};
  } else {
    codes[i / 2] |= std::byte{code} << 4;
  }
}

template <typename From>
float value_at(const void* src, size_t i) {
  return From::decode(load_at<typename From::Bits>(src, i));
}

template <typename From, typename Code>
void encode_row(const void* src, size_t n, size_t block, const float* multipliers, std::byte* codes) {
  for (size_t i = 0; i < n; ++i)
    store_code<Code>(codes, i, Code::encode(value_at<From>(src, i) * multipliers[i / block]));
}

template <typename From, typename Code>
void encode_columns(const std::byte* src, size_t stride, size_t rows, size_t n, const float* multipliers,
                    std::byte* codes, ptrdiff_t code_stride) {
  for (size_t r = 0; r < rows; ++r)
    encode_row<From, Code>(src + r * stride, n, kEach, multipliers, codes + static_cast<ptrdiff_t>(r) * code_stride);
}

template <typename From>
void encode_stochastic(const void* src, size_t n, size_t block, const float* multipliers, const Draw& draw,
                       std::byte* codes) {
  for (size_t i = 0; i < n; ++i) {
    const float y = std::clamp(value_at<From>(src, i) * multipliers[i / block], -kLargestE2M1, kLargestE2M1);
    store_code<E2M1>(codes, i, e2m1_stochastic(y, random_byte(draw.seed, draw.plane, draw.first_element + i)));
  }
}

template <typename Code, typename... T>
void set_code(QuantizeKernels& kernels, size_t code, TypeList<T...>) {
  size_t type = 0;
  ((kernels.encode[type][code] = kernels.encode_by_powers[type][code] = encode_row<T, Code>,
    kernels.encode_columns[type][code] = encode_columns<T, Code>, ++type),
   ...);
}

template <typename... Code, typename... T>
QuantizeKernels make_quantize_kernels(TypeList<Code...>, TypeList<T...> types) {
  QuantizeKernels kernels{.target = "scalar",
                          .encode = {},
                          .encode_by_powers = {},
                          .encode_columns = {},
                          .encode_stochastic = {encode_stochastic<T>...}};
  size_t code = 0;
  (set_code<Code>(kernels, code++, types), ...);
  return kernels;
}

}  // namespace

const ScaleKernels& scalar_scale() {
  static const ScaleKernels kernels{.target = "scalar", .nv = nv_scales, .mx = mx_scales};
  return kernels;
}

const QuantizeKernels& scalar_quantize() {
  static const QuantizeKernels kernels = make_quantize_kernels(CodeTypes{}, QuantizedTypes{});
  return kernels;
}

}  // namespace tessera::codec
