#include "exec/wire/plane_reader.h"

#include <algorithm>
#include <cstring>

#include "base/fail.h"
#include "codec/simd/transpose.h"

namespace tessera {
namespace {

constexpr Index kLinesAtOnce = 128;  // rows that are transposed at a time

// In elements, of one matrix's codes; 0 for the dims of the stack.
std::vector<Index> strides_in_matrix(const Shape& extents, bool transposed) {
  std::vector<Index> strides(extents.size(), 0);
  strides[strides.size() - 2] = transposed ? 1 : extents.back();
  strides.back() = transposed ? extents[extents.size() - 2] : 1;
  return strides;
}

std::vector<Index> strides_of_stack(const Shape& extents) {
  std::vector<Index> strides = element_strides(Shape(extents.begin(), extents.end() - 2));
  strides.resize(extents.size(), 0);
  return strides;
}

std::vector<Index> held_blocks(const IntervalSet& touched, const IntervalSet& held, bool one_scale, Index block) {
  std::vector<Index> local;
  for (const Interval& run : touched.intervals())
    for (Index b = run.begin; b < run.end; ++b) local.push_back(one_scale ? 0 : held.position_of(b * block) / block);
  return local;
}

}  // namespace

PlaneReader::PlaneReader(const WirePiece& piece, const PlaneSource& plane)
    : transposed_(plane.transposed),
      codes_(piece.what(), plane.held, strides_in_matrix(plane.held.extents(), plane.transposed)),
      matrices_(piece.what(), plane.held, strides_of_stack(plane.held.extents())) {
  const WireRegion& what = piece.what();
  TESSERA_CHECK(!what.fused);
  const codec::BlockFormat& format = what.format;
  const Shape extents = plane.held.extents();
  code_row_elements_ = transposed_ ? extents[extents.size() - 2] : extents.back();
  const Index block = transposed_ ? format.block_rows : format.block_columns;
  scale_row_bytes_ = (code_row_elements_ + block - 1) / block * format.scale_bytes();
  if (what.region.empty()) return;
  const int last = plane.held.ndim() - 1;
  block_rows_ = held_blocks(piece.walk().block_rows(), plane.held.dim(last - 1), format.one_scale(), format.block_rows);
  block_columns_ =
      held_blocks(piece.walk().block_columns(), plane.held.dim(last), format.one_scale(), format.block_columns);
}

Index PlaneReader::read(const WirePiece& piece, std::span<const PlaneSource::Matrix> matrices, Index first, Index last,
                        std::byte* to) const {
  Index elements = 0;
  piece.walk().for_each_box(first, last, [&](const BlockBox& box) {
    const std::byte* const codes = matrices[held_matrix(box.matrix)].codes;
    transposed_ ? transpose_codes(piece, codes, box, to) : copy_codes(piece, codes, box, to);
    elements += box.rows.size() * box.columns.size();
  });
  piece.walk().for_each_matrix(first, last, [&](Index matrix, const Interval& bands) {
    const PlaneSource::Matrix& from = matrices[held_matrix(matrix)];
    copy_scales(piece, from.scales, matrix, piece.walk().block_rows_of(bands), to);
    if (bands.begin == 0 && from.amax != nullptr) std::memcpy(to + piece.amax(matrix), from.amax, sizeof(float));
  });
  return elements;
}

// The held region begins at whole bytes, so that nibbles stay what they are; those of other columns become 0.
void PlaneReader::copy_codes(const WirePiece& piece, const std::byte* codes, const BlockBox& box, std::byte* to) const {
  const bool packed = piece.what().format.packed();
  const Index odd = piece.odd(box) ? 1 : 0;
  const Index per_byte = packed ? 2 : 1;
  const auto bytes = static_cast<size_t>(piece.box_row_bytes(box));
  const bool half = packed && (odd + box.columns.size()) % 2 != 0;
  for (Index r = 0; r < box.rows.size(); ++r) {
    std::byte* const row = to + piece.codes(box) + r * piece.row_bytes();
    std::memcpy(row, codes + (codes_.of(box) - odd + r * code_row_elements_) / per_byte, bytes);
    if (odd != 0) row[0] &= std::byte{0xF0};
    if (half) row[bytes - 1] &= std::byte{0x0F};
  }
}

void PlaneReader::transpose_codes(const WirePiece& piece, const std::byte* codes, const BlockBox& box,
                                  std::byte* to) const {
  const codec::BlockFormat& format = piece.what().format;
  const int64_t from = codes_.of(box);
  std::byte* const rows = to + piece.codes(box);
  if (!format.packed()) {
    for (Index column = 0; column < box.columns.size(); column += kLinesAtOnce)
      codec::transpose_codes(format.codes, codes + from + column * code_row_elements_, code_row_elements_,
                             std::min(kLinesAtOnce, box.columns.size() - column), box.rows.size(), rows + column,
                             piece.row_bytes());
    return;
  }
  // One by one: only the column plane of a tensor without a row plane comes here.
  const Index odd = piece.odd(box) ? 1 : 0;
  for (Index r = 0; r < box.rows.size(); ++r) {
    std::byte* const row = rows + r * piece.row_bytes();
    std::memset(row, 0, static_cast<size_t>(piece.box_row_bytes(box)));
    for (Index c = 0; c < box.columns.size(); ++c) {
      const int64_t element = from + c * code_row_elements_ + r;
      const std::byte code = codes[element / 2] >> (element % 2 * 4) & std::byte{15};
      row[(odd + c) / 2] |= code << ((odd + c) % 2 * 4);
    }
  }
}

void PlaneReader::copy_scales(const WirePiece& piece, const std::byte* scales, Index matrix, const Interval& places,
                              std::byte* to) const {
  const codec::BlockFormat& format = piece.what().format;
  const int64_t bytes = format.scale_bytes();
  // An E4M3 scale is repeated in each line of its block.
  const Index repeated = !format.packed() ? 1 : transposed_ ? format.block_columns : format.block_rows;
  for (Index row = places.begin; row < places.end; ++row) {
    const Index held_row = block_rows_[static_cast<size_t>(row)];
    std::byte* const out = to + piece.scale(matrix, row, 0);
    for (size_t column = 0; column < block_columns_.size(); ++column) {
      const Index line = transposed_ ? block_columns_[column] : held_row;
      const Index along = transposed_ ? held_row : block_columns_[column];
      std::memcpy(out + static_cast<int64_t>(column) * bytes,
                  scales + line * repeated * scale_row_bytes_ + along * bytes, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace tessera
