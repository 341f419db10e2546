#include "exec/walk/block_walk.h"

#include "base/fail.h"

namespace tessera {
namespace {

constexpr Index kMaxWireElements = Index{1} << 52;  // in a region or a grid of its blocks; no sum of bytes overflows

Index wire_product(Index a, Index b) {
  Index product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kMaxWireElements)
    fail(ErrorCode::kInvalidArgument, "{} times {} elements to quantise are beyond any memory"_message, a, b);
  return product;
}

void check_region(const WireRegion& what) {
  const std::string_view format = to_string(what.format.spec.format);
  if (what.shape.size() < 2)
    fail(ErrorCode::kInvalidArgument, "{}: a tensor of {} dims is not a matrix"_message, format, what.shape.size());
  if (!is_castable_float(what.src_dtype))
    fail(ErrorCode::kInvalidArgument, "{}: a tensor of {} cannot be quantised: cast it to f32, f16 or bf16"_message,
         format, to_string(what.src_dtype));
  if (what.format.packed() && what.shape.back() % 2 != 0)
    fail(ErrorCode::kInvalidArgument, "{}: a tensor of {} has {} columns, and codes are packed in pairs"_message,
         format, to_string_shape(what.shape), what.shape.back());
  element_count(what.shape);
  if (std::min(what.row0, what.column0) < 0 || std::max(what.row0, what.column0) > kMaxWireElements)
    fail(ErrorCode::kInvalidArgument, "{}: a part of a fused matrix at [{}, {}]"_message, format, what.row0,
         what.column0);
  TESSERA_CHECK_EQ(what.region.dims().size(), what.shape.size());
}

}  // namespace

std::vector<Index> element_strides(std::span<const Index> shape) {
  std::vector<Index> strides(shape.size());
  Index step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<Index>(shape[d], 1);
  }
  return strides;
}

IntervalSet touched_blocks(const IntervalSet& set, Index origin, Index block) {
  std::vector<Interval> blocks;
  blocks.reserve(set.intervals().size());
  for (const Interval& interval : set.intervals())
    blocks.push_back({(interval.begin + origin) / block, (interval.end - 1 + origin) / block + 1});
  return IntervalSet::of_sorted(blocks);
}

BlockWalk::BlockWalk(const WireRegion& what)
    : band_rows_(what.format.one_scale() ? 1 : what.format.block_rows),
      row0_(what.row0),
      one_scale_(what.format.one_scale()) {
  check_region(what);
  if (what.region.empty()) return;
  const std::span<const IntervalSet> dims = what.region.dims();
  rows_ = dims[dims.size() - 2];
  columns_ = dims[dims.size() - 1];
  block_rows_ = touched_blocks(rows_, what.row0, what.format.block_rows);
  block_columns_ = touched_blocks(columns_, what.column0, what.format.block_columns);
  matrices_ = 1;
  for (const IntervalSet& dim : dims.first(dims.size() - 2)) matrices_ = wire_product(matrices_, dim.size());
  wire_product(matrices_, wire_product(rows_.size(), columns_.size()));
  wire_product(matrices_, wire_product(block_rows_.size(), block_columns_.size()));
  wire_product(band_rows_, columns_.size());
  const IntervalSet bands = one_scale_ ? touched_blocks(rows_, what.row0, 1) : block_rows_;
  bands_ = bands.size();
  Index rows_before = 0;
  for (const Interval& rows : rows_.intervals()) {
    const Index first = (rows.begin + row0_) / band_rows_;
    const Index last = (rows.end - 1 + row0_) / band_rows_;
    const Index position = bands.position_of(first);
    row_runs_.push_back({rows, rows_before, position, position + last - first + 1, first});
    rows_before += rows.size();
  }
  for (const Interval& columns : columns_.intervals())
    column_runs_.push_back(
        {columns, block_columns_.position_of((columns.begin + what.column0) / what.format.block_columns)});
}

Interval BlockWalk::block_rows_of(Interval bands) const {
  return one_scale_ ? Interval{0, bands.begin == 0 ? 1 : 0} : bands;
}

BoxOffsets::BoxOffsets(const WireRegion& what, const Region& owned, std::span<const Index> strides) {
  const std::span<const IntervalSet> dims = what.region.dims();
  TESSERA_CHECK_EQ(strides.size(), dims.size());
  row_stride_ = strides[dims.size() - 2];
  column_stride_ = strides[dims.size() - 1];
  if (what.region.empty()) return;
  const auto offset = [&](size_t d, Index index) {
    return owned.dim(static_cast<int>(d)).position_of(index) * strides[d];
  };
  for (size_t d = 0; d + 2 < dims.size(); ++d) {
    std::vector<int64_t>& offsets = stack_.emplace_back();
    for (const Interval& interval : dims[d].intervals())
      for (Index i = interval.begin; i < interval.end; ++i) offsets.push_back(offset(d, i));
  }
  for (const Interval& rows : dims[dims.size() - 2].intervals()) {
    row_runs_.push_back(offset(dims.size() - 2, rows.begin));
    row_begins_.push_back(rows.begin);
  }
  for (const Interval& columns : dims.back().intervals())
    column_runs_.push_back(offset(dims.size() - 1, columns.begin));
}

int64_t BoxOffsets::of_matrix(Index matrix) const {
  int64_t offset = 0;
  for (size_t d = stack_.size(); d-- > 0;) {
    const auto size = static_cast<Index>(stack_[d].size());
    offset += stack_[d][static_cast<size_t>(matrix % size)];
    matrix /= size;
  }
  return offset;
}

int64_t BoxOffsets::of(const BlockBox& box) const {
  return of_matrix(box.matrix) + row_runs_[box.row_run] + (box.rows.begin - row_begins_[box.row_run]) * row_stride_ +
         column_runs_[box.column_run];
}

}  // namespace tessera
