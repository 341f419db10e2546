// The reference sums of squares.
#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename T>
void add(const std::byte* values, size_t n, double* lanes) {
  for (size_t i = 0; i < n; ++i) {
    const auto code = load_at<typename T::Bits>(values, i);
    double value = 0;
    if constexpr (std::is_same_v<T, F64>)
      value = std::bit_cast<double>(code);
    else
      value = double{T::decode(code)};
    lanes[i % kSquareLanes] += value * value;
  }
}

}  // namespace

const SquareKernels& scalar_squares() {
  static const SquareKernels kernels{.target = "scalar", .add = {add<F64>, add<F32>, add<F16>, add<BF16>}};
  return kernels;
}

}  // namespace tessera::codec
