// Computes from a checkpoint what arrives of a tensor that travels quantised: the oracle of `tessera recv --verify`. It
// processes whole matrices, in bands of rows, while the bus processes what each rank holds.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/quantize.h"

namespace tessera::tools {

class Interrupt;

// Reuses its memory for each tensor: a band of a matrix in each of its forms. Not thread-safe.
class QuantisedSlices {
 public:
  explicit QuantisedSlices(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Writes the elements of `region` to `dst`, packed row-major, in `dtype`: quantised from the file's dtype with the
  // amaxes of its whole matrices, and decoded. NaN and infinity go through the formulas. REQUIRES: two dims or more,
  // f64, f32, f16 or bf16 on both sides, an even last dim for nvfp4, bytes_of(dtype, region.size()) at `dst`. Throws as
  // Checkpoint::read_slice does.
  void read(const TensorInfo& tensor, Format format, const Region& region, DType dtype, std::span<std::byte> dst,
            const Interrupt& interrupt);

 private:
  struct Matrix {
    const TensorInfo& tensor;
    std::vector<IntervalSet> place;  // of the matrix in its stack, one index for each dim
    Index rows() const { return tensor.shape[tensor.shape.size() - 2]; }
    Index columns() const { return tensor.shape.back(); }
  };
  // In f32, f16 or bf16.
  MatrixView load(const Matrix& matrix, const Interval& rows);
  float amax_of(const Matrix& matrix, const Interrupt& interrupt);
  // Rows of the matrix, quantised and decoded, in `dtype`.
  std::span<const std::byte> decode(const Matrix& matrix, const Interval& rows, const QuantSpec& spec, float amax,
                                    DType dtype);

  const Checkpoint& checkpoint_;
  std::vector<std::byte> raw_, values_, codes_, scales_, decoded_, cast_;
};

}  // namespace tessera::tools
