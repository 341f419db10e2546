// The reference reductions of floats.
#include <cmath>
#include <type_traits>

#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/kernel_set.h"
#include "codec/simd/reduce_ops.h"

namespace tessera::codec {
namespace {

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, F64>, double, float>;

template <typename T>
Accumulator<T> widen(typename T::Bits code) {
  if constexpr (std::is_same_v<T, F64>) {
    return std::bit_cast<double>(code);
  } else {
    return T::decode(code);
  }
}

template <typename T>
typename T::Bits round_once(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, F64>) {
    return std::isnan(value) ? kNaNF64 : std::bit_cast<uint64_t>(value);
  } else {
    return T::encode(value);
  }
}

template <typename T>
void accumulate_first(const void* src, void* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) store_at(acc, i, widen<T>(load_at<typename T::Bits>(src, i)));
}

template <typename T, typename Op>
void accumulate_next(const void* src, void* acc, size_t n) {
  for (size_t i = 0; i < n; ++i)
    store_at(acc, i, Op::apply(load_at<Accumulator<T>>(acc, i), widen<T>(load_at<typename T::Bits>(src, i))));
}

template <typename T, bool kAverage>
void finish(const void* acc, void* dst, size_t n, int count) {
  const auto divisor = static_cast<Accumulator<T>>(kAverage ? count : 1);
  for (size_t i = 0; i < n; ++i) store_at(dst, i, round_once<T>(load_at<Accumulator<T>>(acc, i) / divisor));
}

template <typename... T>
ReduceKernels make_reduce_kernels(TypeList<T...>) {
  return {.target = "scalar",
          .first = {accumulate_first<T>...},
          .next = {{accumulate_next<T, Add>...},
                   {accumulate_next<T, Add>...},
                   {accumulate_next<T, Minimum>...},
                   {accumulate_next<T, Maximum>...},
                   {accumulate_next<T, Multiply>...}},
          .finish = {finish<T, false>...},
          .finish_average = {finish<T, true>...}};
}

}  // namespace

const ReduceKernels& scalar_reduce() {
  static const ReduceKernels kernels = make_reduce_kernels(ReducedTypes{});
  return kernels;
}

}  // namespace tessera::codec
