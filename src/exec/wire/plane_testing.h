// For tests of planes: pieces that a sender would have sent, and planes that a rank would hold.
#pragma once

#include <cstring>
#include <vector>

#include "exec/wire/wire_testing.h"

namespace tessera::exec_testing {

// The piece that a sender would have sent.
inline std::vector<std::byte> piece_of(const WirePiece& piece, const WireReference& whole) {
  std::vector<std::byte> data(static_cast<size_t>(piece.bytes()));
  const BlockWalk& walk = piece.walk();
  const bool packed = whole.format().packed();
  walk.for_each_box(0, walk.all_bands(), [&](const BlockBox& box) {
    const Index matrix = piece.tensor_matrix(box.matrix);
    for (Index r = 0; r < box.rows.size(); ++r) {
      std::byte* row = data.data() + piece.codes(box) + r * piece.row_bytes();
      for (Index c = 0; c < box.columns.size(); ++c) {
        const std::byte code{whole.code(matrix, box.rows.begin + r, box.columns.begin + c)};
        const Index at = c + (piece.odd(box) ? 1 : 0);
        if (packed)
          row[at / 2] |= code << (at % 2 * 4);
        else
          row[at] = code;
      }
    }
  });
  for (Index m = 0; m < walk.matrices(); ++m) {
    const Index matrix = piece.tensor_matrix(m);
    const float amax = whole.amax(matrix);
    if (needs_amax(whole.format().spec.format)) std::memcpy(data.data() + piece.amax(m), &amax, sizeof(amax));
    Index row = 0;
    for (const Interval& rows : walk.block_rows().intervals())
      for (Index br = rows.begin; br < rows.end; ++br, ++row) {
        Index column = 0;
        for (const Interval& columns : walk.block_columns().intervals())
          for (Index bc = columns.begin; bc < columns.end; ++bc, ++column)
            std::memcpy(data.data() + piece.scale(m, row, column), whole.scale(matrix, br, bc),
                        static_cast<size_t>(whole.format().scale_bytes()));
      }
  }
  return data;
}

// [0, n) without some of its blocks, except for the last one.
inline IntervalSet random_blocks(Random& random, Index n, Index block) {
  std::vector<Interval> kept;
  for (Index at = 0; at < n; at += block) {
    const Index end = std::min(at + block, n);
    if (end < n && pick(random, 0, 2) == 0) continue;
    if (!kept.empty() && kept.back().end == at)
      kept.back().end = end;
    else
      kept.push_back({at, end});
  }
  return IntervalSet::of_sorted(kept);
}

// The expected planes of what one rank holds, one after another.
struct ExpectedPlanes {
  std::vector<std::byte> codes, scales, amaxes;

  ExpectedPlanes(const WireReference& whole, const WireTensor& tensor, const Region& held, bool transposed) {
    const codec::BlockFormat& format = whole.format();
    const Shape extents = held.extents();
    const Index rows = extents[extents.size() - 2];
    const Index columns = extents.back();
    const Index along = transposed ? rows : columns;
    const auto up = [](Index n, Index block) { return (n + block - 1) / block; };
    const Index block_lines = format.packed() ? 1 : transposed ? format.block_columns : format.block_rows;
    const Index block_along = transposed ? format.block_rows : format.block_columns;
    const Index scale_row = up(along, block_along);
    const Index scale_matrix = scale_row * up(transposed ? columns : rows, block_lines);
    Index matrices = 1;
    for (size_t d = 0; d + 2 < extents.size(); ++d) matrices *= extents[d];
    codes.resize(static_cast<size_t>(matrices * rows * columns / (format.packed() ? 2 : 1)));
    scales.resize(static_cast<size_t>(matrices * scale_matrix * format.scale_bytes()));
    Index linear = 0;
    for_each_element(held, [&](const std::vector<Index>& at) {
      const Index matrix = linear / (rows * columns);
      const Index row = linear / columns % rows;
      const Index column = linear % columns;
      const Index line = transposed ? column : row;
      const Index place = transposed ? row : column;
      const Index code = matrix * rows * columns + line * along + place;
      const std::byte value{whole.code(tensor.matrix_of(at), at[at.size() - 2], at.back())};
      if (format.packed())
        codes[static_cast<size_t>(code / 2)] |= value << (code % 2 * 4);
      else
        codes[static_cast<size_t>(code)] = value;
      const Index scale = matrix * scale_matrix + line / block_lines * scale_row + place / block_along;
      std::memcpy(
          scales.data() + scale * format.scale_bytes(),
          whole.scale(tensor.matrix_of(at), at[at.size() - 2] / format.block_rows, at.back() / format.block_columns),
          static_cast<size_t>(format.scale_bytes()));
      if (row == 0 && column == 0 && needs_amax(format.spec.format)) {
        const float amax = whole.amax(tensor.matrix_of(at));
        const auto* bytes = reinterpret_cast<const std::byte*>(&amax);
        amaxes.insert(amaxes.end(), bytes, bytes + sizeof(amax));
      }
      ++linear;
    });
  }
};

// A region that planes may hold: its edges cut no block.
inline Region random_held(Random& random, const codec::BlockFormat& format, const Shape& shape) {
  std::vector<IntervalSet> dims;
  for (size_t d = 0; d < shape.size(); ++d) {
    const Index block = d + 2 < shape.size() ? 1 : d + 1 < shape.size() ? format.block_rows : format.block_columns;
    dims.push_back(
        random_blocks(random, shape[d], block == codec::BlockFormat::kAll ? pick(random, 1, shape[d]) : block));
  }
  return Region(std::move(dims));
}

}  // namespace tessera::exec_testing
