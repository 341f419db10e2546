// Scales of blocks in any format, what elements are multiplied by, and the kernel that encodes them.
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
  // `amax`: the whole matrix's, where needs_amax(). `input`: f32, f16 or bf16; blocks of FP8 ask how far it reaches.
  BlockScaler(const QuantSpec& spec, float amax, DType input);

  // Of a format with one scale.
  const Scale<float>& whole() const { return whole_; }
  // Of n blocks: scales as they are stored, and what their elements are multiplied by.
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

// What codes are multiplied by, by their scale's byte: of formats whose scales are bytes. `amax`: nvfp4's.
std::array<float, 256> scale_table(Format format, float amax);

}  // namespace tessera::codec
