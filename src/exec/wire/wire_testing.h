// For tests of quantised routes: random tensors cut among senders and receivers, and the expected results.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "codec/simd/cast.h"
#include "codec/simd/kernel.h"
#include "exec/testing.h"
#include "exec/wire/wire_piece.h"

namespace tessera::exec_testing {

inline std::vector<codec::BlockFormat> every_wire_format() {
  std::vector<codec::BlockFormat> formats;
  for (const Format format : all_formats()) formats.emplace_back(format);
  formats.emplace_back(Format::kNvfp4, NvScaling::k1x16);
  return formats;
}

// Disjoint sets that cover [0, n), each of any number of intervals; some may be empty.
inline std::vector<IntervalSet> random_partition(Random& random, Index n, size_t parts, Index longest) {
  std::vector<std::vector<Interval>> cuts(parts);
  for (Index at = 0; at < n;) {
    const Index end = std::min(n, at + pick(random, 1, longest));
    cuts[static_cast<size_t>(pick(random, 0, static_cast<Index>(parts) - 1))].push_back({at, end});
    at = end;
  }
  std::vector<IntervalSet> sets;
  for (const std::vector<Interval>& cut : cuts) sets.push_back(IntervalSet::of_sorted(cut));
  return sets;
}

// Disjoint regions that cover a tensor: products of partitions of some of its dims.
inline std::vector<Region> random_regions(Random& random, const Shape& shape) {
  std::vector<Region> regions{Region::full(shape)};
  for (size_t d = 0; d < shape.size(); ++d) {
    if (pick(random, 0, 1) == 0) continue;
    const Index longest = pick(random, 0, 2) == 0 ? std::max<Index>(shape[d] / 8, 1) : shape[d];
    const auto sets = random_partition(random, shape[d], static_cast<size_t>(pick(random, 1, 3)), longest);
    std::vector<Region> cut;
    for (const Region& region : regions)
      for (const IntervalSet& set : sets) {
        std::vector<IntervalSet> dims(region.dims().begin(), region.dims().end());
        dims[d] = set;
        cut.emplace_back(std::move(dims));
      }
    regions = std::move(cut);
  }
  return regions;
}

// Calls visit(indices) for every element of a region, row-major.
template <typename Visit>
void for_each_element(const Region& region, const Visit& visit) {
  if (region.empty()) return;
  std::vector<std::vector<Index>> elements;
  for (const IntervalSet& set : region.dims()) {
    std::vector<Index>& dim = elements.emplace_back();
    for (const Interval& interval : set.intervals())
      for (Index i = interval.begin; i < interval.end; ++i) dim.push_back(i);
  }
  std::vector<size_t> place(elements.size());
  std::vector<Index> at(elements.size());
  while (true) {
    for (size_t d = 0; d < at.size(); ++d) at[d] = elements[d][place[d]];
    visit(std::as_const(at));
    size_t d = at.size();
    while (d > 0 && ++place[d - 1] == elements[d - 1].size()) place[--d] = 0;
    if (d == 0) return;
  }
}

// A stack of matrices, quantised whole by the scalar reference.
class WireReference {
 public:
  WireReference(Random& random, const codec::BlockFormat& format, DType dtype, Index matrices, Index rows,
                Index columns)
      : format_(format), dtype_(dtype), rows_(rows), columns_(columns) {
    for (Index m = 0; m < matrices; ++m) add_matrix(random);
  }

  const codec::BlockFormat& format() const { return format_; }
  Shape shape() const { return {static_cast<Index>(matrices_.size()), rows_, columns_}; }
  DType dtype() const { return dtype_; }
  float amax(Index matrix) const { return at(matrix).amax; }

  // Index in decoded().
  Index place_of(Index matrix, Index row, Index column) const { return (matrix * rows_ + row) * columns_ + column; }
  const std::byte* value(Index matrix, Index row, Index column) const {
    return at(matrix).values.data() + bytes_of(dtype_, row * columns_ + column);
  }
  uint8_t code(Index matrix, Index row, Index column) const {
    const int64_t start = row * at(matrix).shape.code_row_bytes();
    const auto byte = [&](int64_t b) { return at(matrix).codes[static_cast<size_t>(start + b)]; };
    if (!format_.packed()) return static_cast<uint8_t>(byte(column));
    return static_cast<uint8_t>(byte(column / 2) >> (column % 2 * 4) & std::byte{15});
  }
  const std::byte* scale(Index matrix, Index block_row, Index block_column) const {
    const PlaneShape& shape = at(matrix).shape;
    const bool by_row = shape.scale_rows == rows_ && !format_.one_scale();
    const Index line = by_row ? block_row * format_.block_rows : block_row;
    return at(matrix).scales.data() + line * shape.scale_row_bytes() + block_column * format_.scale_bytes();
  }
  // The received values: [matrices][rows][columns] of `to`.
  std::vector<std::byte> decoded(DType to) const {
    const ForcedKernel scalar("scalar");
    const DType as = to == DType::kF64 ? DType::kF32 : to;
    const Index elements = rows_ * columns_;
    std::vector<std::byte> all(static_cast<size_t>(bytes_of(to, static_cast<Index>(matrices_.size()) * elements)));
    std::vector<std::byte> values(static_cast<size_t>(bytes_of(as, elements)));
    for (size_t m = 0; m < matrices_.size(); ++m) {
      const Matrix& matrix = matrices_[m];
      dequantize(
          format_.spec, Plane::kRow,
          {matrix.codes.data(), matrix.shape.code_row_bytes(), matrix.scales.data(), matrix.shape.scale_row_bytes()},
          matrix.amax, {values.data(), as, rows_, columns_, columns_});
      cast_row(as, to)(values.data(), all.data() + m * static_cast<size_t>(bytes_of(to, elements)),
                       static_cast<size_t>(elements));
    }
    return all;
  }

 private:
  struct Matrix {
    std::vector<std::byte> values, codes, scales;
    PlaneShape shape;
    float amax = 0;
  };
  const Matrix& at(Index matrix) const { return matrices_[static_cast<size_t>(matrix)]; }

  void add_matrix(Random& random) {
    const ForcedKernel scalar("scalar");
    Matrix& matrix = matrices_.emplace_back();
    const auto elements = static_cast<size_t>(rows_ * columns_);
    std::vector<float> floats(elements);
    const auto exponent = static_cast<int>(pick(random, -6, 6));
    for (float& value : floats)
      value = std::ldexp(std::normal_distribution<float>()(random), exponent + static_cast<int>(pick(random, -3, 3)));
    matrix.values.resize(elements * static_cast<size_t>(bytes_of(dtype_, 1)));
    cast_row(DType::kF32, dtype_)(floats.data(), matrix.values.data(), elements);
    const DType as = dtype_ == DType::kF64 ? DType::kF32 : dtype_;
    std::vector<std::byte> input(elements * static_cast<size_t>(bytes_of(as, 1)));
    cast_row(dtype_, as)(matrix.values.data(), input.data(), elements);
    const MatrixView view{input.data(), as, rows_, columns_, columns_};
    matrix.shape = plane_shape(format_.spec, Plane::kRow, rows_, columns_);
    matrix.amax = compute_amax({&view, 1})[0].value;
    matrix.codes.resize(static_cast<size_t>(matrix.shape.code_bytes()));
    matrix.scales.resize(static_cast<size_t>(matrix.shape.scale_bytes()));
    quantize(
        view, format_.spec, {matrix.amax, 0},
        {{matrix.codes.data(), matrix.shape.code_row_bytes(), matrix.scales.data(), matrix.shape.scale_row_bytes()},
         {}});
  }

  codec::BlockFormat format_;
  DType dtype_;
  Index rows_, columns_;
  std::vector<Matrix> matrices_;
};

// A tensor whose matrices are parts of a reference's, or the whole.
struct WireTensor {
  const WireReference* whole = nullptr;
  Shape shape{};
  bool fused = false;
  Index row0 = 0;
  Index column0 = 0;

  WireRegion region(const Region& part) const {
    return {.format = whole->format(),
            .src_dtype = whole->dtype(),
            .shape = shape,
            .region = part,
            .fused = fused,
            .row0 = row0,
            .column0 = column0};
  }
  Index matrix_of(const std::vector<Index>& at) const {
    Index matrix = 0;
    for (size_t d = 0; d + 2 < at.size(); ++d) matrix = matrix * shape[d] + at[d];
    return matrix;
  }
  Index row_of(const std::vector<Index>& at) const { return at[at.size() - 2] + row0; }
  Index column_of(const std::vector<Index>& at) const { return at.back() + column0; }

  // The digest of its image, computed element by element.
  Digest digest() const {
    const codec::BlockFormat& format = whole->format();
    const bool packed = format.packed();
    const Index rows = shape[shape.size() - 2];
    const Index matrices = element_count(shape) / (rows * shape.back());
    std::vector<std::byte> image(static_cast<size_t>((element_count(shape) / (packed ? 2 : 1) + 3) / 4 * 4));
    size_t linear = 0;
    for_each_element(Region::full(shape), [&](const std::vector<Index>& at) {
      const std::byte code{whole->code(matrix_of(at), row_of(at), column_of(at))};
      image[packed ? linear / 2 : linear] |= code << (packed ? linear % 2 * 4 : 0);
      ++linear;
    });
    for (Index m = 0; m < matrices; ++m)
      for (Index i = row0 / format.block_rows; i <= (row0 + rows - 1) / format.block_rows; ++i)
        for (Index j = column0 / format.block_columns; j <= (column0 + shape.back() - 1) / format.block_columns; ++j)
          image.insert(image.end(), whole->scale(m, i, j), whole->scale(m, i, j) + format.scale_bytes());
    Digest digest{.elements = linear};
    digest_bytes(digest, 0, image.data(), image.size());
    return digest;
  }
};

}  // namespace tessera::exec_testing
