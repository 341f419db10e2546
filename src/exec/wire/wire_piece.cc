#include "exec/wire/wire_piece.h"

#include "base/rounding.h"

namespace tessera {
namespace {

constexpr int64_t kSectionAlignment = 16;

// Bytes of an interval of columns.
int64_t code_span(const WireRegion& what, const Interval& columns) {
  if (!what.format.packed()) return columns.size();
  return (columns.end - 1) / 2 - columns.begin / 2 + 1;
}

uint64_t to_word(uint64_t bytes) {
  return round_up(bytes, 4);
}

}  // namespace

WirePiece::WirePiece(const WireRegion& what)
    : what_(what), walk_(what), elements_(what, Region::full(what.shape), element_strides(what.shape)) {
  if (walk_.matrices() == 0) return;
  for (const Interval& columns : walk_.columns().intervals()) {
    column_runs_.push_back(row_bytes_);
    row_bytes_ += code_span(what, columns);
  }
  const codec::BlockFormat& format = what_.format;
  if (needs_amax(format.spec.format)) scales_ = round_up(amax(walk_.matrices()), kSectionAlignment);
  codes_ = round_up(scale(walk_.matrices(), 0, 0), kSectionAlignment);
  bytes_ = codes_ + walk_.matrices() * walk_.rows().size() * row_bytes_;

  const Index rows = what.shape[what.shape.size() - 2];
  block_rows_ = BlockDim(walk_.block_rows(), walk_.rows(), rows, what.row0, format.block_rows);
  block_columns_ =
      BlockDim(walk_.block_columns(), walk_.columns(), what.shape.back(), what.column0, format.block_columns);
  const auto elements = static_cast<uint64_t>(element_count(what.shape));
  const uint64_t matrices = elements / static_cast<uint64_t>(rows * what.shape.back());
  image_scales_ = to_word(format.packed() ? elements / 2 : elements);
  image_amaxes_ = to_word(image_scales_ + matrices * block_rows_.count * block_columns_.count *
                                              static_cast<uint64_t>(format.scale_bytes()));
}

int64_t WirePiece::scale(Index matrix, Index block_row, Index block_column) const {
  const Index block = (matrix * walk_.block_rows().size() + block_row) * walk_.block_columns().size() + block_column;
  return scales_ + block * what_.format.scale_bytes();
}

int64_t WirePiece::codes(const BlockBox& box) const {
  return codes_ + (box.matrix * walk_.rows().size() + box.rows_before) * row_bytes_ + column_runs_[box.column_run];
}

int64_t WirePiece::box_row_bytes(const BlockBox& box) const {
  return code_span(what_, box.columns);
}

WirePiece::BlockDim::BlockDim(const IntervalSet& touched, const IntervalSet& elements, Index size, Index origin,
                              Index block) {
  const Index first = origin / block;
  count = static_cast<uint64_t>((origin + size - 1) / block - first + 1);
  for (const Interval& blocks : touched.intervals()) {
    for (Index b = blocks.begin; b < blocks.end; ++b) {
      const bool owned = elements.contains(std::max<Index>(b * block - origin, 0));
      const Index place = runs.empty() ? 0 : runs.back().places.end;
      if (b > blocks.begin && runs.back().owned == owned) {
        ++runs.back().places.end;
      } else {
        runs.push_back({{place, place + 1}, static_cast<uint64_t>(b - first), owned});
      }
    }
  }
}

Index WirePiece::tensor_matrix(Index matrix) const {
  return elements_.of_matrix(matrix) / (what_.shape[what_.shape.size() - 2] * what_.shape.back());
}

void WirePiece::digest(const std::byte* data, Index first, Index last, Digest& main, Digest& rest) const {
  const Index per_byte = what_.format.packed() ? 2 : 1;
  walk_.for_each_box(first, last, [&](const BlockBox& box) {
    digest_rows(main, static_cast<uint64_t>(elements_.of(box) / per_byte),
                static_cast<uint64_t>(elements_.row_stride() / per_byte), data + codes(box), row_bytes_,
                static_cast<size_t>(box_row_bytes(box)), static_cast<size_t>(box.rows.size()));
    main.elements += static_cast<uint64_t>(box.rows.size() * box.columns.size());
  });
  walk_.for_each_matrix(first, last, [&](Index matrix, Interval bands) {
    digest_scales(data, matrix, walk_.block_rows_of(bands), main, rest);
    if (bands.begin == 0 && scales_ > 0)
      digest_bytes(rest, image_amaxes_ + static_cast<uint64_t>(tensor_matrix(matrix)) * sizeof(float),
                   data + amax(matrix), sizeof(float));
  });
}

void WirePiece::digest_scales(const std::byte* data, Index matrix, const Interval& rows, Digest& main,
                              Digest& rest) const {
  const auto bytes = static_cast<uint64_t>(what_.format.scale_bytes());
  const uint64_t image_row = block_columns_.count * bytes;
  const uint64_t image = image_scales_ + static_cast<uint64_t>(tensor_matrix(matrix)) * block_rows_.count * image_row;
  auto run = std::partition_point(block_rows_.runs.begin(), block_rows_.runs.end(),
                                  [&](const BlockRun& r) { return r.places.end <= rows.begin; });
  for (; run != block_rows_.runs.end() && run->places.begin < rows.end; ++run) {
    const Index first = std::max(rows.begin, run->places.begin);
    const Index last = std::min(rows.end, run->places.end);
    const uint64_t image_first = image + (run->image + static_cast<uint64_t>(first - run->places.begin)) * image_row;
    for (const BlockRun& column : block_columns_.runs)
      digest_rows(run->owned && column.owned ? main : rest, image_first + column.image * bytes, image_row,
                  data + scale(matrix, first, column.places.begin), scale_row_bytes(),
                  static_cast<size_t>(column.places.size()) * bytes, static_cast<size_t>(last - first));
  }
}

}  // namespace tessera
