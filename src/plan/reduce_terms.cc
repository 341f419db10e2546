#include "plan/reduce_terms.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/fail.h"
#include "codec/float/float_bits.h"

namespace tessera::plan {
namespace {

using Terms = std::span<const std::byte* const>;

template <typename T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void write(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

// Unsigned arithmetic of at least int's width wraps; narrower types are promoted to int, which overflows.
template <typename T>
T wrapping(ReduceOp op, T a, T b) {
  using Wide = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
  const Wide x = std::make_unsigned_t<T>(a);
  const Wide y = std::make_unsigned_t<T>(b);
  return static_cast<T>(op == ReduceOp::kSum ? x + y : x * y);
}

template <typename T>
T fold(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kMin) return std::min(a, b);
    if (op == ReduceOp::kMax) return std::max(a, b);
    return wrapping(op, a, b);
  } else {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
    if (op == ReduceOp::kProduct) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    const bool a_is_less = a < b || (a == b && std::signbit(a));
    return (op == ReduceOp::kMin) == a_is_less ? a : b;
  }
}

template <typename T, typename Load>
T fold_all(ReduceOp op, Terms terms, Load load) {
  T value = load(terms[0]);
  for (const std::byte* term : terms.subspan(1)) value = fold(op, value, load(term));
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kAvg) value /= static_cast<T>(terms.size());
    if (std::isnan(value)) value = std::numeric_limits<T>::quiet_NaN();
  }
  return value;
}

template <typename T>
void reduce_plain(ReduceOp op, Terms terms, std::byte* result) {
  write(fold_all<T>(op, terms, read<T>), result);
}

void reduce_complex(ReduceOp op, Terms terms, std::byte* result) {
  auto value = read<std::complex<float>>(terms[0]);
  for (const std::byte* term : terms.subspan(1)) {
    const auto next = read<std::complex<float>>(term);
    const float a = value.real(), b = value.imag(), c = next.real(), d = next.imag();
    value = op == ReduceOp::kProduct ? std::complex(a * c - b * d, a * d + b * c) : std::complex(a + c, b + d);
  }
  const auto finish = [&](float part) {
    if (op == ReduceOp::kAvg) part /= static_cast<float>(terms.size());
    return std::isnan(part) ? std::numeric_limits<float>::quiet_NaN() : part;
  };
  write(std::complex(finish(value.real()), finish(value.imag())), result);
}

}  // namespace

void reduce_terms(ReduceOp op, DType dtype, Terms terms, std::byte* result) {
  switch (dtype) {
    case DType::kF64:
      return reduce_plain<double>(op, terms, result);
    case DType::kF32:
      return reduce_plain<float>(op, terms, result);
    case DType::kF16:
      return write(
          f16_from_f32(fold_all<float>(op, terms, [](const std::byte* p) { return f32_from_f16(read<uint16_t>(p)); })),
          result);
    case DType::kBF16:
      return write(bf16_from_f32(
                       fold_all<float>(op, terms, [](const std::byte* p) { return f32_from_bf16(read<uint16_t>(p)); })),
                   result);
    case DType::kI64:
      return reduce_plain<int64_t>(op, terms, result);
    case DType::kI32:
      return reduce_plain<int32_t>(op, terms, result);
    case DType::kI16:
      return reduce_plain<int16_t>(op, terms, result);
    case DType::kI8:
      return reduce_plain<int8_t>(op, terms, result);
    case DType::kU64:
      return reduce_plain<uint64_t>(op, terms, result);
    case DType::kU32:
      return reduce_plain<uint32_t>(op, terms, result);
    case DType::kU16:
      return reduce_plain<uint16_t>(op, terms, result);
    case DType::kU8:
      return reduce_plain<uint8_t>(op, terms, result);
    case DType::kC64:
      return reduce_complex(op, terms, result);
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E8M0:
    case DType::kF4:
    case DType::kBool:
      break;
  }
  fail_internal("a plan that reduces {}", to_string(dtype));
}

}  // namespace tessera::plan
