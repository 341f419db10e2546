// A walk over a region of a quantised tensor: by matrices (of the last two dims), by bands of block rows, by boxes of
// rows and columns. Blocks may be counted from an origin outside the tensor, if several tensors are parts of one
// matrix. The *touched* blocks of a matrix, those that hold an element of the region, form a grid: [touched block
// rows][touched block columns].
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/quant/blocks.h"
#include "exec/walk/route.h"
#include "tessera/layout.h"

namespace tessera {

// The properties of a region that travels quantised; both ends know them.
struct WireRegion {
  codec::BlockFormat format{Format::kNvfp4};
  DType src_dtype = DType::kF32;  // f64, f32, f16 or bf16
  Shape shape{};                  // global: [..stack.., M, K]
  Region region{};
  // For a part of a fused matrix: the position of the tensor's first element in it. Blocks at its edges may then hold
  // elements of other parts.
  bool fused = false;
  Index row0 = 0;
  Index column0 = 0;
};

// Rows and columns of one matrix, each an interval of the tensor's.
struct BlockBox {
  Index matrix = 0;  // index among the region's matrices
  Interval rows{};
  Interval columns{};
  Index rows_before = 0;  // of the region, in this matrix
  size_t row_run = 0;     // the interval of the region that has the box
  size_t column_run = 0;
  Index block_row = 0;  // of the first element's block, in the grid
  Index block_column = 0;
};

// Immutable, hence thread-safe; visiting allocates nothing.
class BlockWalk {
 public:
  // Throws Error(kInvalidArgument) for fewer than two dims, dtypes that cannot be quantised, an odd number of columns
  // with packed pairs, and sizes that no memory has.
  explicit BlockWalk(const WireRegion& what);

  // A band is a block row or, for formats with one scale, a row; they are numbered matrix by matrix.
  Index matrices() const { return matrices_; }
  Index bands() const { return bands_; }  // of a matrix
  Index all_bands() const { return matrices_ * bands_; }
  Index band_elements() const { return band_rows_ * columns_.size(); }  // of the largest
  const IntervalSet& rows() const { return rows_; }                     // of each matrix
  const IntervalSet& columns() const { return columns_; }
  Index elements() const { return matrices_ * rows_.size() * columns_.size(); }

  const IntervalSet& block_rows() const { return block_rows_; }  // the touched ones
  const IntervalSet& block_columns() const { return block_columns_; }
  Index blocks() const { return block_rows_.size() * block_columns_.size(); }  // of a matrix
  // The touched block rows that bands [first, last) of a matrix begin.
  Interval block_rows_of(Interval bands) const;

  // Calls visit(matrix, Interval of its bands) for bands [first, last) over all matrices.
  template <typename Visit>
  void for_each_matrix(Index first, Index last, const Visit& visit) const;
  // Calls visit(const BlockBox&) for boxes that together cover bands [first, last) over all matrices.
  template <typename Visit>
  void for_each_box(Index first, Index last, const Visit& visit) const;

 private:
  struct RowRun {
    Interval rows;
    Index rows_before = 0;
    Index first_band = 0;
    Index last_band = 0;   // exclusive
    Index band_index = 0;  // of first_band, counted from the blocks' origin
  };
  struct ColumnRun {
    Interval columns;
    Index first_block = 0;
  };

  Index matrices_ = 0;
  Index bands_ = 0;
  Index band_rows_ = 1;
  Index row0_ = 0;
  bool one_scale_ = false;
  IntervalSet rows_, columns_, block_rows_, block_columns_;
  std::vector<RowRun> row_runs_;
  std::vector<ColumnRun> column_runs_;
};

// The offsets of a walk's boxes in an array that owns its region.
class BoxOffsets {
 public:
  // `strides` has one entry for each dim, in the unit of the offsets.
  BoxOffsets(const WireRegion& what, const Region& owned, std::span<const Index> strides);

  int64_t of(const BlockBox& box) const;
  int64_t of_matrix(Index matrix) const;
  Index row_stride() const { return row_stride_; }
  Index column_stride() const { return column_stride_; }

 private:
  std::vector<std::vector<int64_t>> stack_;  // by dim, for each of the region's indices
  std::vector<int64_t> row_runs_, column_runs_;
  std::vector<Index> row_begins_;  // of the intervals
  Index row_stride_ = 0;
  Index column_stride_ = 0;
};

// A box of an array whose first element is at `data`; offsets count its bytes.
template <typename Byte>
codec::MatrixBox<Byte> matrix_box(const WireRegion& what, const BlockBox& box, const BoxOffsets& offsets, Byte* data,
                                  DType dtype) {
  return {.data = data + offsets.of(box),
          .dtype = dtype,
          .rows = box.rows.size(),
          .columns = box.columns.size(),
          .row_stride = offsets.row_stride(),
          .column_stride = offsets.column_stride(),
          .row = box.rows.begin + what.row0,
          .column = box.columns.begin + what.column0};
}

// In elements, of a contiguous tensor.
std::vector<Index> element_strides(std::span<const Index> shape);

// The blocks that hold elements of `set`, counted from `origin` elements before the dim's first.
IntervalSet touched_blocks(const IntervalSet& set, Index origin, Index block);

template <typename Visit>
void BlockWalk::for_each_matrix(Index first, Index last, const Visit& visit) const {
  while (first < last) {
    const Index matrix = first / bands_;
    const Index begin = first % bands_;
    const Index end = std::min(bands_, begin + last - first);
    visit(matrix, Interval{begin, end});
    first += end - begin;
  }
}

template <typename Visit>
void BlockWalk::for_each_box(Index first, Index last, const Visit& visit) const {
  for_each_matrix(first, last, [&](Index matrix, Interval bands) {
    auto run = std::partition_point(row_runs_.begin(), row_runs_.end(),
                                    [&](const RowRun& r) { return r.last_band <= bands.begin; });
    for (; run != row_runs_.end() && run->first_band < bands.end; ++run) {
      const auto row_of_band = [&](Index band) {
        return (run->band_index + band - run->first_band) * band_rows_ - row0_;
      };
      BlockBox box{.matrix = matrix, .row_run = static_cast<size_t>(run - row_runs_.begin())};
      const Index first_band = std::max(bands.begin, run->first_band);
      box.rows.begin = std::max(run->rows.begin, row_of_band(first_band));
      box.rows.end = bands.end < run->last_band ? row_of_band(bands.end) : run->rows.end;
      box.rows_before = run->rows_before + box.rows.begin - run->rows.begin;
      box.block_row = one_scale_ ? 0 : first_band;
      for (const ColumnRun& column : column_runs_) {
        box.columns = column.columns;
        box.column_run = static_cast<size_t>(&column - column_runs_.data());
        box.block_column = column.first_block;
        visit(static_cast<const BlockBox&>(box));
      }
    }
  });
}

}  // namespace tessera
