#include <cstring>
#include <type_traits>
#include <utility>

#include "codec/quant/hadamard.h"
#include "codec/simd/kernel_set.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/simd/transpose_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/float/float_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::codec::HWY_NAMESPACE {
#if TESSERA_SIMD_TARGET

// Vectors of 16 bytes. Every target has enough registers for them, and wider ones gain little with so few shuffles.
inline constexpr size_t kBytes = 16;
template <typename T>
using D128 = hn::FixedTag<T, kBytes / sizeof(T)>;
template <typename T>
using V128 = hn::Vec<D128<T>>;
template <typename T>
inline constexpr size_t kSquare = kBytes / sizeof(T);

// Transposes a square. Each round interleaves the first half of the rows with the second half; after log2(kSquare)
// rounds every element is in its place. The loop is unrolled, so that all rows stay in registers.
template <typename T>
struct Square {
  V128<T> row[kSquare<T>];
};

template <typename T, size_t... kI>
HWY_INLINE Square<T> shuffled(const Square<T>& rows, std::index_sequence<kI...>) {
  const D128<T> d;
  constexpr size_t kHalf = kSquare<T> / 2;
  return {(kI % 2 == 0 ? hn::InterleaveLower(d, rows.row[kI / 2], rows.row[kI / 2 + kHalf])
                       : hn::InterleaveUpper(d, rows.row[kI / 2], rows.row[kI / 2 + kHalf]))...};
}

template <typename T, size_t... kI>
HWY_INLINE Square<T> load_square(const std::byte* src, size_t stride, std::index_sequence<kI...> indices) {
  Square<T> square{hn::LoadU(D128<T>(), at<T>(src + kI * stride))...};
  square = shuffled(square, indices);
  if constexpr (kSquare<T> > 2) square = shuffled(square, indices);
  if constexpr (kSquare<T> > 4) square = shuffled(square, indices);
  if constexpr (kSquare<T> > 8) square = shuffled(square, indices);
  return square;
}

// Loads the square and transposes it.
template <typename T>
HWY_INLINE Square<T> load_square(const std::byte* src, size_t stride) {
  return load_square<T>(src, stride, std::make_index_sequence<kSquare<T>>());
}

template <typename T, size_t... kI>
HWY_INLINE void store_square(const Square<T>& square, std::byte* dst, size_t stride, std::index_sequence<kI...>) {
  (hn::StoreU(square.row[kI], D128<T>(), at<T>(dst + kI * stride)), ...);
}

template <typename T>
void transpose_elements(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                        size_t dst_stride) {
  constexpr size_t kN = kSquare<T>;
  const auto reference = scalar_transpose().elements[sizeof(T) / 2];
  const size_t whole_rows = rows - rows % kN;
  const size_t whole_columns = columns - columns % kN;
  for (size_t r = 0; r < whole_rows; r += kN) {
    for (size_t c = 0; c < whole_columns; c += kN) {
      store_square(load_square<T>(src + r * src_stride + c * sizeof(T), src_stride),
                   dst + c * dst_stride + r * sizeof(T), dst_stride, std::make_index_sequence<kN>());
    }
  }
  reference(src + whole_columns * sizeof(T), src_stride, rows, columns - whole_columns,
            dst + whole_columns * dst_stride, dst_stride);
  reference(src + whole_rows * src_stride, src_stride, rows - whole_rows, whole_columns, dst + whole_rows * sizeof(T),
            dst_stride);
}

// `column` has a byte from each of 16 rows, with two columns in each byte. Stores one of the two in eight bytes.
template <int kShift>
HWY_INLINE void store_pairs(V128<uint8_t> column, std::byte* p) {
  const D128<uint16_t> d;
  const hn::Half<D128<uint8_t>> half;
  const auto words = hn::BitCast(d, column);
  const auto low = hn::And(kShift == 0 ? words : hn::ShiftRight<4>(words), hn::Set(d, uint16_t{0x0F}));
  const auto high =
      hn::And(kShift == 0 ? hn::ShiftRight<4>(words) : hn::ShiftRight<8>(words), hn::Set(d, uint16_t{0xF0}));
  const auto pairs = hn::BitCast(D128<int16_t>(), hn::Or(low, high));
  hn::StoreU(hn::DemoteTo(half, pairs), half, at<uint8_t>(p));
}

template <size_t... kI>
HWY_INLINE void store_nibbles(const Square<uint8_t>& square, std::byte* dst, size_t stride,
                              std::index_sequence<kI...>) {
  ((store_pairs<0>(square.row[kI], dst + 2 * kI * stride), store_pairs<4>(square.row[kI], dst + (2 * kI + 1) * stride)),
   ...);
}

void transpose_nibbles(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                       size_t dst_stride) {
  constexpr size_t kN = kSquare<uint8_t>;
  const auto reference = scalar_transpose().nibbles;
  const size_t whole_rows = rows - rows % kN;
  const size_t whole_columns = columns - columns % (2 * kN);
  for (size_t r = 0; r < whole_rows; r += kN) {
    for (size_t c = 0; c < whole_columns; c += 2 * kN) {
      store_nibbles(load_square<uint8_t>(src + r * src_stride + c / 2, src_stride), dst + c * dst_stride + r / 2,
                    dst_stride, std::make_index_sequence<kN>());
    }
  }
  reference(src + whole_columns / 2, src_stride, rows, columns - whole_columns, dst + whole_columns * dst_stride,
            dst_stride);
  reference(src + whole_rows * src_stride, src_stride, rows - whole_rows, whole_columns, dst + whole_rows / 2,
            dst_stride);
}

// Transforms as many columns as there are lanes. The products are exact, so fusing them with the sums changes nothing.
HWY_INLINE void hadamard_columns(const std::byte* src, size_t src_stride, std::byte* dst, size_t dst_stride) {
  hn::Vec<DF> x[kHadamard];
  for (size_t i = 0; i < kHadamard; ++i) x[i] = hn::BitCast(DF(), Lane<BF16>::load(src + i * src_stride));
  for (size_t j = 0; j < kHadamard; ++j) {
    auto sum = hn::Zero(DF());
    for (size_t i = 0; i < kHadamard; ++i) sum = hn::Add(sum, hn::Mul(x[i], hn::Set(DF(), hadamard_factor(i, j))));
    Lane<BF16>::store(hn::BitCast(D(), sum), dst + j * dst_stride);
  }
}

void hadamard(const std::byte* src, size_t src_stride, size_t columns, std::byte* dst, size_t dst_stride) {
  const size_t lanes = hn::Lanes(D());
  const size_t whole = columns - columns % lanes;
  for (size_t c = 0; c < whole; c += lanes)
    hadamard_columns(src + c * sizeof(uint16_t), src_stride, dst + c * sizeof(uint16_t), dst_stride);
  if (whole < columns)
    scalar_transpose().hadamard(src + whole * sizeof(uint16_t), src_stride, columns - whole,
                                dst + whole * sizeof(uint16_t), dst_stride);
}

const TransposeKernels& transpose_kernels() {
  static const TransposeKernels kernels{
      .target = hwy::TargetName(HWY_TARGET),
      .elements = {transpose_elements<uint8_t>, transpose_elements<uint16_t>, transpose_elements<uint32_t>},
      .nibbles = transpose_nibbles,
      .hadamard = hadamard};
  return kernels;
}

#else
const TransposeKernels& transpose_kernels() {
  return scalar_transpose();
}
#endif
}  // namespace tessera::codec::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::codec {

HWY_EXPORT(transpose_kernels);
const TransposeKernels& simd_transpose(int64_t target) {
  return TESSERA_CALL_TARGET(transpose_kernels, target);
}

}  // namespace tessera::codec
#endif
