// The kernels of one variant, as tables of functions. To add a family, add its struct here, a scalar_<family>() in
// <family>_scalar.cc, a simd_<family>() in <family>_simd.cc, and a member of KernelSet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "codec/quant/quantize_formulas.h"
#include "codec/simd/cast.h"
#include "codec/simd/fold.h"
#include "codec/simd/reduce.h"

namespace tessera::codec {

// Rows and columns: f64, f32, f16, bf16, E4M3, E5M2, as DType numbers them.
inline constexpr size_t kFloatTypes = 6;
static_assert(static_cast<size_t>(DType::kF8E5M2) + 1 == kFloatTypes);

struct CastKernels {
  std::string_view target;  // the variant for which it was compiled; every family has it, so that tests can check it
  CastRow row[kFloatTypes][kFloatTypes];         // [from][to]; null on the diagonal
  CastRow stream_row[kFloatTypes][kFloatTypes];  // with non-temporal stores
};

struct StreamKernels {
  std::string_view target;
  void (*copy_rows)(std::byte* dst, ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes,
                    size_t rows);
};

// Rows of the image: row r begins at byte `offset + r * image_stride`.
struct DigestRows {
  const std::byte* data;
  ptrdiff_t data_stride;
  uint64_t offset;
  uint64_t image_stride;
  size_t row_bytes;
  size_t rows;
};
// Add to sums[k] what the rows contribute to D_k.
struct DigestKernels {
  std::string_view target;
  void (*rows)(const DigestRows& rows, uint64_t sums[2]);
  // Also streams the rows to `dst`.
  void (*copy_rows)(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, uint64_t sums[2]);
};

// Columns: the floats that have SIMD variants: f64, f32, f16, bf16, as DType numbers them.
inline constexpr size_t kReducedFloats = 4;
inline constexpr size_t kReduceOps = 5;
struct ReduceKernels {
  std::string_view target;
  AccumulateRow first[kReducedFloats];
  AccumulateRow next[kReduceOps][kReducedFloats];
  FinishRow finish[kReducedFloats];          // rounds
  FinishRow finish_average[kReducedFloats];  // divides, then rounds
};

// [term][accumulated]: f32, f16, bf16, as DType numbers them.
inline constexpr size_t kFoldedTypes = 3;
using FoldTable = std::array<std::array<FoldRow, kFoldedTypes>, kFoldedTypes>;
struct FoldKernels {
  std::string_view target;
  FoldTable first;
  FoldTable next;
};

// Quantisation is from f32, f16 and bf16, as DType numbers them, to E4M3, E5M2 and packed E2M1.
inline constexpr size_t kQuantizedTypes = 3;
inline constexpr size_t kCodeTypes = 3;
static_assert(static_cast<size_t>(DType::kF32) == 1 && static_cast<size_t>(DType::kBF16) == kQuantizedTypes);

// `block` below is the number of elements of a row that share a scale: 16, 32, 128 or one of these values.
inline constexpr size_t kEach = 1;
inline constexpr size_t kWholeRow = static_cast<size_t>(-1);

// Determines the random numbers with which the elements of a row are rounded.
struct Draw {
  uint64_t seed;
  uint32_t plane;
  uint64_t first_element;
};

struct AmaxKernels {
  std::string_view target;
  // The largest magnitude in each block of `block` elements of a row; the last block may be short. NaNs do not count.
  // All three return true if there was a NaN or an infinity.
  bool (*blocks[kQuantizedTypes])(const void* src, size_t n, size_t block, float* amax);
  // Raises `amax` to the largest magnitude of a row.
  bool (*row[kQuantizedTypes])(const void* src, size_t n, float& amax);
  // Raises each of `n` magnitudes, in src's type, to the largest in its column of `rows` rows, `stride` bytes apart.
  bool (*fold[kQuantizedTypes])(const std::byte* src, size_t stride, size_t rows, size_t n, void* magnitudes);
};

struct ScaleKernels {
  std::string_view target;
  // For n blocks, by codec/quant/quantize_formulas.h.
  void (*nv)(const float* amax, size_t n, const NvConstants& constants, uint8_t* scales, float* multipliers);
  void (*mx)(const float* amax, size_t n, float reciprocal, uint8_t* scales, float* multipliers);
};

using EncodeRow = void (*)(const void* src, size_t n, size_t block, const float* multipliers, std::byte* codes);
using EncodeColumns = void (*)(const std::byte* src, size_t stride, size_t rows, size_t n, const float* multipliers,
                               std::byte* codes, ptrdiff_t code_stride);

struct QuantizeKernels {
  std::string_view target;
  // Multiplies in f32, rounds and saturates. One multiplier for each `block` elements. E2M1: n is even.
  EncodeRow encode[kQuantizedTypes][kCodeTypes];
  EncodeRow encode_by_powers[kQuantizedTypes][kCodeTypes];  // the same if the multipliers are powers of two
  // Encodes `rows` rows with one multiplier, a power of two, for each column.
  EncodeColumns encode_columns[kQuantizedTypes][kCodeTypes];
  void (*encode_stochastic[kQuantizedTypes])(const void* src, size_t n, size_t block, const float* multipliers,
                                             const Draw& draw, std::byte* codes);
};

using DecodeRow = void (*)(const std::byte* codes, size_t n, size_t block, const float* scales, void* dst);

// Powers of two by which no finite code becomes subnormal or infinite, in f32 and bf16: 2^kLeastPower to 2^kMostPower.
inline constexpr int kLeastPower = -110;
inline constexpr int kMostPower = 112;

struct DecodeKernels {
  std::string_view target;
  // Multiplies in f32 and rounds once. One scale, any float, for each `block` elements. E2M1: if n is odd, the last
  // byte's high nibble does not count.
  DecodeRow row[kCodeTypes][kQuantizedTypes];
  DecodeRow stream_row[kCodeTypes][kQuantizedTypes];  // with non-temporal stores
  // The same if the scales are such powers of two.
  DecodeRow row_by_powers[kCodeTypes][kQuantizedTypes];
  DecodeRow stream_row_by_powers[kCodeTypes][kQuantizedTypes];
};

struct TransposeKernels {
  std::string_view target;
  // Turns rows of `src` into columns of `dst`. Strides in bytes. Elements of 1, 2 and 4 bytes.
  void (*elements[3])(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                      size_t dst_stride);
  // For elements of half a byte: a byte holds two of a row (in `dst`, of a column). Rows and columns are even.
  void (*nibbles)(const std::byte* src, size_t src_stride, size_t rows, size_t columns, std::byte* dst,
                  size_t dst_stride);
  // Multiplies 16 rows of bf16 by the 16 x 16 matrix of the random Hadamard transform, column by column.
  void (*hadamard)(const std::byte* src, size_t src_stride, size_t columns, std::byte* dst, size_t dst_stride);
};

struct ChangeKernels {
  std::string_view target;
  // For atoms of 1, 2, 4 and 8 bytes: see codec/simd/changes.h.
  void (*find[4])(const std::byte* now, const std::byte* before, size_t n, uint64_t* changed);
};

// Lanes of a sum of squares: codec/simd/squares.h.
inline constexpr size_t kSquareLanes = 8;
struct SquareKernels {
  std::string_view target;
  // Adds the squares of n elements at any address to lanes[i % kSquareLanes].
  void (*add[kReducedFloats])(const std::byte* values, size_t n, double* lanes);
};

const CastKernels& scalar_cast();
const StreamKernels& scalar_stream();
const DigestKernels& scalar_digest();
const ReduceKernels& scalar_reduce();
const FoldKernels& scalar_fold();
const AmaxKernels& scalar_amax();
const ScaleKernels& scalar_scale();
const QuantizeKernels& scalar_quantize();
const DecodeKernels& scalar_decode();
const TransposeKernels& scalar_transpose();
const ChangeKernels& scalar_changes();
const SquareKernels& scalar_squares();
// `target` is one of Highway's HWY_* bits that this CPU supports, except HWY_SCALAR and HWY_EMU128.
const CastKernels& simd_cast(int64_t target);
const StreamKernels& simd_stream(int64_t target);
const DigestKernels& simd_digest(int64_t target);
const ReduceKernels& simd_reduce(int64_t target);
const FoldKernels& simd_fold(int64_t target);
const AmaxKernels& simd_amax(int64_t target);
const ScaleKernels& simd_scale(int64_t target);
const QuantizeKernels& simd_quantize(int64_t target);
const DecodeKernels& simd_decode(int64_t target);
const TransposeKernels& simd_transpose(int64_t target);
const ChangeKernels& simd_changes(int64_t target);
const SquareKernels& simd_squares(int64_t target);

struct KernelSet {
  std::string_view target;
  const CastKernels* cast;
  const StreamKernels* stream;
  const DigestKernels* digest;
  const ReduceKernels* reduce;
  const FoldKernels* fold;
  const AmaxKernels* amax;
  const ScaleKernels* scale;
  const QuantizeKernels* quantize;
  const DecodeKernels* decode;
  const TransposeKernels* transpose;
  const ChangeKernels* changes;
  const SquareKernels* squares;
};

const KernelSet& active_kernels();

}  // namespace tessera::codec
