// The reference for amaxes: one element at a time.
#include <algorithm>
#include <cmath>

#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"

namespace tessera::codec {
namespace {

template <typename T>
float magnitude_at(const void* src, size_t i) {
  return std::fabs(T::decode(load_at<typename T::Bits>(src, i)));
}

// Raises `amax` to a magnitude, unless amax is NaN. True if the magnitude is NaN or infinite.
bool grow(float& amax, float magnitude) {
  if (magnitude > amax) amax = magnitude;
  return !(magnitude <= kLargestF32);
}

template <typename T>
bool amax_of_row(const void* src, size_t n, float& amax) {
  bool nonfinite = false;
  for (size_t i = 0; i < n; ++i) nonfinite |= grow(amax, magnitude_at<T>(src, i));
  return nonfinite;
}

template <typename T>
bool amax_of_blocks(const void* src, size_t n, size_t block, float* amax) {
  bool nonfinite = false;
  for (size_t first = 0; first < n; first += block, ++amax) {
    *amax = 0;
    for (size_t i = first; i < std::min(first + block, n); ++i) nonfinite |= grow(*amax, magnitude_at<T>(src, i));
  }
  return nonfinite;
}

template <typename T>
bool fold_rows(const std::byte* src, size_t stride, size_t rows, size_t n, void* magnitudes) {
  bool nonfinite = false;
  for (size_t i = 0; i < n; ++i) {
    float amax = T::decode(load_at<typename T::Bits>(magnitudes, i));
    for (size_t r = 0; r < rows; ++r) nonfinite |= grow(amax, magnitude_at<T>(src + r * stride, i));
    store_at(magnitudes, i, T::encode(amax));
  }
  return nonfinite;
}

template <typename... T>
AmaxKernels make_amax_kernels(TypeList<T...>) {
  return {.target = "scalar", .blocks = {amax_of_blocks<T>...}, .row = {amax_of_row<T>...}, .fold = {fold_rows<T>...}};
}

}  // namespace

const AmaxKernels& scalar_amax() {
  static const AmaxKernels kernels = make_amax_kernels(QuantizedTypes{});
  return kernels;
}

}  // namespace tessera::codec
