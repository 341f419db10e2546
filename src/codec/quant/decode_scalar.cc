// The reference for decoding: one element at a time.
#include <type_traits>

#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename Code>
float code_at(const std::byte* codes, size_t i) {
  if constexpr (!std::is_same_v<Code, E2M1>) return Code::decode(static_cast<uint8_t>(codes[i]));
  return Code::decode(static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) & std::byte{15}));
}

template <typename Code, typename To>
void decode_row(const std::byte* codes, size_t n, size_t block, const float* scales, void* dst) {
  for (size_t i = 0; i < n; ++i) store_at(dst, i, To::encode(code_at<Code>(codes, i) * scales[i / block]));
}

template <typename Code, typename... To>
void set_code(DecodeKernels& kernels, size_t code, TypeList<To...>) {
  size_t type = 0;
  ((kernels.row[code][type] = kernels.stream_row[code][type] = kernels.row_by_powers[code][type] =
        kernels.stream_row_by_powers[code][type] = decode_row<Code, To>,
    ++type),
   ...);
}

template <typename... Code>
DecodeKernels make_decode_kernels(TypeList<Code...>) {
  DecodeKernels kernels{
      .target = "scalar", .row = {}, .stream_row = {}, .row_by_powers = {}, .stream_row_by_powers = {}};
  size_t code = 0;
  (set_code<Code>(kernels, code++, QuantizedTypes{}), ...);
  return kernels;
}

}  // namespace

const DecodeKernels& scalar_decode() {
  static const DecodeKernels kernels = make_decode_kernels(CodeTypes{});
  return kernels;
}

}  // namespace tessera::codec
