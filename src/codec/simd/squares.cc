#include "codec/simd/squares.h"

#include "base/fail.h"
#include "codec/simd/kernel_set.h"

namespace tessera {

bool sums_squares(DType dtype) {
  return static_cast<size_t>(dtype) < codec::kReducedFloats;
}

double sum_of_squares(DType dtype, const std::byte* values, size_t n) {
  if (!sums_squares(dtype))
    fail(ErrorCode::kInvalidArgument, "cannot add up squares of {}: f64, f32, bf16 and f16 are possible"_message,
         to_string(dtype));
  double lanes[codec::kSquareLanes] = {};
  codec::active_kernels().squares->add[static_cast<size_t>(dtype)](values, n, lanes);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace tessera
