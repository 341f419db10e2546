#include "codec/simd/reduce_plain.h"

#include <cstdint>

#include "codec/float/float_types.h"
#include "codec/float/unaligned.h"
#include "codec/simd/reduce_ops.h"

namespace tessera::codec {
namespace {

struct Complex {
  float re;
  float im;
  Complex operator+(Complex x) const { return {re + x.re, im + x.im}; }
  Complex operator*(Complex x) const { return {re * x.re - im * x.im, re * x.im + im * x.re}; }
};

template <typename T>
void copy(const void* src, void* acc, size_t n) {
  if (n != 0) std::memmove(acc, src, n * sizeof(T));
}

template <typename T, typename Op>
void accumulate(const void* src, void* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) store_at(acc, i, Op::apply(load_at<T>(acc, i), load_at<T>(src, i)));
}

template <typename T>
void finish_integer(const void* acc, void* dst, size_t n, int /*count*/) {
  copy<T>(acc, dst, n);
}

template <bool kAverage>
void finish_complex(const void* acc, void* dst, size_t n, int count) {
  const auto divisor = static_cast<float>(kAverage ? count : 1);
  for (size_t i = 0; i < 2 * n; ++i) store_at(dst, i, F32::encode(load_at<float>(acc, i) / divisor));
}

template <typename T>
AccumulateRow integer_row(ReduceOp op, bool first) {
  if (first) return copy<T>;
  switch (op) {
    case ReduceOp::kMin:
      return accumulate<T, Minimum>;
    case ReduceOp::kMax:
      return accumulate<T, Maximum>;
    case ReduceOp::kProduct:
      return accumulate<T, Multiply>;
    default:
      return accumulate<T, Add>;
  }
}

AccumulateRow complex_row(ReduceOp op, bool first) {
  if (first) return copy<Complex>;
  return op == ReduceOp::kProduct ? accumulate<Complex, Multiply> : accumulate<Complex, Add>;
}

}  // namespace

AccumulateRow plain_accumulate_row(ReduceOp op, DType src, bool first) {
  switch (src) {
    case DType::kI64:
      return integer_row<int64_t>(op, first);
    case DType::kI32:
      return integer_row<int32_t>(op, first);
    case DType::kI16:
      return integer_row<int16_t>(op, first);
    case DType::kI8:
      return integer_row<int8_t>(op, first);
    case DType::kU64:
      return integer_row<uint64_t>(op, first);
    case DType::kU32:
      return integer_row<uint32_t>(op, first);
    case DType::kU16:
      return integer_row<uint16_t>(op, first);
    case DType::kU8:
      return integer_row<uint8_t>(op, first);
    default:
      return complex_row(op, first);
  }
}

FinishRow plain_finish_row(ReduceOp op, DType src) {
  if (src == DType::kC64) return op == ReduceOp::kAvg ? finish_complex<true> : finish_complex<false>;
  switch (bits_of(src)) {
    case 64:
      return finish_integer<uint64_t>;
    case 32:
      return finish_integer<uint32_t>;
    case 16:
      return finish_integer<uint16_t>;
    default:
      return finish_integer<uint8_t>;
  }
}

}  // namespace tessera::codec
