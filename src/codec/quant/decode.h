// Decodes parts of planes (tessera/quantize.h) to where they belong in a matrix: bands of rows of a shard, as a gather
// reads them. All parts together give the bits of dequantize() of the whole.
#pragma once

#include <cstdint>

#include "tessera/quantize.h"

namespace tessera::codec {

// Rows and columns of the matrix that a plane was made from, whichever way the plane lies.
struct DecodeBox {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;
};

// A value: cheap to make and to copy, made once for all bands of a plane. Immutable, hence thread-safe; decoding
// allocates nothing. Each call uses the kernels that are active at that moment (codec/simd/kernel.h).
class PlaneDecoder {
 public:
  // Of planes whose matrix has so many columns, into `to`: f32, f16 or bf16. Throws Error(kInvalidArgument) for another
  // `to`, for a spec that check_spec() refuses, and for the column plane under a Hadamard transform, which is not the
  // matrix.
  PlaneDecoder(const QuantSpec& spec, Plane plane, int64_t columns, DType to);

  // Decodes rows [first_row, first_row + rows) of the `plane_rows` rows whose plane `from` is: a whole matrix or a
  // shard that begins at a whole block. `to` is [rows, columns] of the decoder's dtype, where the band belongs. The
  // values are computed in f32 by docs/formats/quantized.md and rounded once. `amax`: nvfp4's, of the whole tensor.
  //
  // A band may begin at any row, except that nvfp4's column plane, which packs pairs of rows, needs an even one. It is
  // read fastest in bands of at least 128 rows that begin at multiples of 128: column planes lie transposed (all but
  // MXFP8's), and shorter bands use only parts of their cache lines.
  //
  // `stream`: with non-temporal stores, for destinations that are larger than the caches. Call stream_fence()
  // (codec/simd/stream.h) before you tell another thread about the data.
  //
  // REQUIRES: the sizes agree (checked). Never throws otherwise; expects the default floating-point environment.
  void rows(const ConstPlaneMemory& from, int64_t plane_rows, int64_t first_row, int64_t rows, float amax,
            const MatrixMemory& to, bool stream) const;

  // The same for some of the columns, from a multiple of 128 on. `to` is [box.rows, box.columns].
  void box(const ConstPlaneMemory& from, int64_t plane_rows, const DecodeBox& box, float amax, const MatrixMemory& to,
           bool stream) const;

  // How the codes lie: as the matrix does, or transposed.
  bool transposed() const { return transposed_; }

 private:
  class Job;

  Format format_;
  DType code_dtype_ = DType::kF8E4M3;
  DType scale_dtype_ = DType::kF32;
  DType to_;
  BlockShape block_;  // in the matrix's own directions
  int64_t columns_;
  bool transposed_ = false;
  bool repeated_ = false;  // the scale of a block stands in each line of codes
};

}  // namespace tessera::codec
