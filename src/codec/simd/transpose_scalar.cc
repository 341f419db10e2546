// The reference transposes and Hadamard transform.
#include <bit>
#include <cstring>

#include "codec/float/float_bits.h"
#include "codec/float/unaligned.h"
#include "codec/quant/hadamard.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <size_t kBytes>
void transpose_elements(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                        size_t dst_stride) {
  for (size_t c = 0; c < columns; ++c)
    for (size_t r = 0; r < rows; ++r)
      std::memcpy(dst + c * dst_stride + r * kBytes, src + r * src_stride + c * kBytes, kBytes);
}

void transpose_nibbles(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                       size_t dst_stride) {
  const auto nibble = [=](size_t r, size_t c) { return src[r * src_stride + c / 2] >> (c % 2 * 4) & std::byte{15}; };
  for (size_t c = 0; c < columns; ++c)
    for (size_t r = 0; r < rows; r += 2) dst[c * dst_stride + r / 2] = nibble(r, c) | nibble(r + 1, c) << 4;
}

void hadamard(const std::byte* src, size_t src_stride, size_t columns, std::byte* dst, size_t dst_stride) {
  for (size_t c = 0; c < columns; ++c) {
    for (size_t j = 0; j < kHadamard; ++j) {
      float sum = 0;
      for (size_t i = 0; i < kHadamard; ++i)
        sum += f32_from_bf16(load_at<uint16_t>(src + i * src_stride, c)) * hadamard_factor(i, j);
      store_at(dst + j * dst_stride, c, bf16_from_f32(sum));
    }
  }
}

}  // namespace

const TransposeKernels& scalar_transpose() {
  static const TransposeKernels kernels{
      .target = "scalar",
      .elements = {transpose_elements<1>, transpose_elements<2>, transpose_elements<4>},
      .nibbles = transpose_nibbles,
      .hadamard = hadamard};
  return kernels;
}

}  // namespace tessera::codec
