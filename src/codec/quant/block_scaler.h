// Scales of blocks in any format, the multipliers of elements, and the kernel that encodes them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "codec/quant/quantize_formulas.h"
#include "codec/simd/kernel_set.h"
#include "tessera/quantize.h"

namespace tessera::codec {

// Immutable, hence thread-safe; allocates nothing.
class BlockScaler {
 public:
  // `amax`: the whole matrix's, if needs_amax(). `input`: f32, f16 or bf16; FP8 blocks depend on its range.
  BlockScaler(const QuantSpec& spec, float amax, DType input);

  // For a format with one scale.
  const Scale<float>& whole() const { return whole_; }
  // For n blocks: their scales as stored, and the multipliers of their elements.
  void scale(const float* amaxes, size_t n, std::byte* scales, float* multipliers) const noexcept;
  EncodeRow encode() const { return encode_; }  // rounding to nearest

 private:
  const ScaleKernels& kernels_;
  const bool nv_;
  const EncodeRow encode_;
  NvConstants nv_constants_{};
  Fp8Constants fp8_{};
  float mx_reciprocal_ = 0;  // 0: not MX
  Scale<float> whole_{1, 1};
};

// The multiplier of codes by the byte of their scale, for formats whose scales are bytes. `amax`: for nvfp4.
std::array<float, 256> scale_table(Format format, float amax);

}  // namespace tessera::codec
