// The kernels of one variant, as tables of functions. To add a family: its struct here, a scalar_<family>() in
// <family>_scalar.cc, a simd_<family>() in <family>_simd.cc, and a member of KernelSet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "codec/cast.h"
#include "codec/reduce.h"

namespace tessera::codec {

// Rows and columns: f64, f32, f16, bf16, E4M3, E5M2, as DType numbers them.
inline constexpr size_t kFloatTypes = 6;
static_assert(static_cast<size_t>(DType::kF8E5M2) + 1 == kFloatTypes);

struct CastKernels {
  std::string_view target;  // the variant for which it was compiled; every family has one, so that tests can tell
  CastRow row[kFloatTypes][kFloatTypes];         // [from][to]; null on the diagonal
  CastRow stream_row[kFloatTypes][kFloatTypes];  // with non-temporal stores
};

struct StreamKernels {
  std::string_view target;
  void (*copy_rows)(std::byte* dst, ptrdiff_t dst_stride, const std::byte* src, ptrdiff_t src_stride, size_t row_bytes,
                    size_t rows);
};

// Rows of the image: row r starts at byte `offset + r * image_stride`.
struct DigestRows {
  const std::byte* data;
  ptrdiff_t data_stride;
  uint64_t offset;
  uint64_t image_stride;
  size_t row_bytes;
  size_t rows;
};
class Prefetcher;
// Add W_j * T_k[j] to sums[k]. Offsets count from the start of a block in which every row ends; `ahead` stands at the
// first row and is stepped by every line that is read.
struct DigestKernels {
  std::string_view target;
  void (*block_rows)(const DigestRows& rows, Prefetcher& ahead, uint64_t sums[2]);
  // Streams the rows to `dst` on the way.
  void (*block_copy)(const DigestRows& rows, std::byte* dst, ptrdiff_t dst_stride, Prefetcher& ahead, uint64_t sums[2]);
};

// Of the floats that have SIMD variants: f64, f32, f16, bf16, as DType numbers them.
inline constexpr size_t kReducedFloats = 4;
inline constexpr size_t kReduceOps = 5;
struct ReduceKernels {
  std::string_view target;
  AccumulateRow first[kReducedFloats];
  AccumulateRow next[kReduceOps][kReducedFloats];
  FinishRow finish[kReducedFloats];          // rounds
  FinishRow finish_average[kReducedFloats];  // divides, then rounds
};

const CastKernels& scalar_cast();
const StreamKernels& scalar_stream();
const DigestKernels& scalar_digest();
const ReduceKernels& scalar_reduce();
// `target`: one of Highway's HWY_* bits, supported by this CPU and other than HWY_SCALAR and HWY_EMU128.
const CastKernels& simd_cast(int64_t target);
const StreamKernels& simd_stream(int64_t target);
const DigestKernels& simd_digest(int64_t target);
const ReduceKernels& simd_reduce(int64_t target);

struct KernelSet {
  std::string_view target;
  const CastKernels* cast;
  const StreamKernels* stream;
  const DigestKernels* digest;
  const ReduceKernels* reduce;
};

const KernelSet& active_kernels();

}  // namespace tessera::codec
