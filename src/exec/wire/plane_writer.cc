#include "exec/wire/plane_writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/fail.h"
#include "codec/simd/transpose.h"

namespace tessera {
namespace {

constexpr Index kTile = 128;  // rows and columns that are transposed at a time

// Strides in elements of codes [matrices, rows, columns], or [matrices, columns, rows].
std::vector<Index> code_strides(const Shape& extents, bool transposed) {
  std::vector<Index> strides = element_strides(extents);
  if (transposed) {
    strides[strides.size() - 2] = 1;
    strides.back() = extents[extents.size() - 2];
  }
  return strides;
}

std::vector<Index> matrix_strides(const Shape& extents) {
  std::vector<Index> strides = element_strides(Shape(extents.begin(), extents.end() - 2));
  strides.resize(extents.size(), 0);
  return strides;
}

std::byte nibble(const std::byte* row, Index element) {
  return row[element / 2] >> (element % 2 * 4) & std::byte{15};
}

// Another thread may be changing the other nibble of the byte.
void put_nibble(std::byte* codes, Index element, std::byte code) {
  const std::atomic_ref<std::byte> byte(codes[element / 2]);
  const auto shift = element % 2 * 4;
  std::byte then = byte.load(std::memory_order_relaxed);
  while (!byte.compare_exchange_weak(then, (then & std::byte{15} << (4 - shift)) | code << shift,
                                     std::memory_order_relaxed)) {
  }
}

}  // namespace

PlaneWriter::PlaneWriter(std::shared_ptr<const WirePiece> piece, const Region& held,
                         std::span<const PlaneTarget> planes)
    : WireReader(std::move(piece)), matrices_(this->piece().what(), held, matrix_strides(held.extents())) {
  const WireRegion& what = this->piece().what();
  TESSERA_CHECK(!what.fused);
  const codec::BlockFormat& format = what.format;
  const Shape extents = held.extents();
  const Index rows = extents[extents.size() - 2];
  const auto blocks_in = [](Index elements, Index block) { return (elements + block - 1) / block; };
  // An E4M3 scale is repeated in each row of its block.
  const bool repeated = format.packed();
  for (const PlaneTarget& target : planes) {
    const Index lines = target.transposed ? extents.back() : rows;
    const Index along = target.transposed ? rows : extents.back();
    const Index block_lines = target.transposed ? format.block_columns : format.block_rows;
    const Index block_along = target.transposed ? format.block_rows : format.block_columns;
    const int64_t scale_row = blocks_in(along, block_along) * format.scale_bytes();
    planes_.push_back({.target = target,
                       .codes = BoxOffsets(what, held, code_strides(extents, target.transposed)),
                       .code_row_elements = along,
                       .scale_row_bytes = scale_row,
                       .scale_matrix_bytes = scale_row * (repeated ? lines : blocks_in(lines, block_lines))});
  }
  const int columns_dim = held.ndim() - 1;
  const auto collect = [&](const IntervalSet& touched, int dim, Index block) {
    std::vector<Block> blocks;
    const IntervalSet& elements = held.dim(dim);
    const IntervalSet& here = what.region.dim(dim);
    Index place = 0;
    for (const Interval& run : touched.intervals()) {
      for (Index b = run.begin; b < run.end; ++b, ++place) {
        const Index local = format.one_scale() ? 0 : elements.position_of(b * block);
        const Index first = format.one_scale() ? elements.intervals().front().begin : b * block;
        if (!here.contains(first)) continue;
        const Index lines = format.one_scale() ? 1 : std::min(block, elements.size() - local);
        blocks.push_back({.place = place, .local = format.one_scale() ? 0 : local / block, .lines = lines});
      }
    }
    return blocks;
  };
  if (what.region.empty()) return;
  block_rows_ = collect(this->piece().walk().block_rows(), columns_dim - 1, format.block_rows);
  block_columns_ = collect(this->piece().walk().block_columns(), columns_dim, format.block_columns);
}

int64_t PlaneWriter::band_bytes() const {
  const int64_t bits = piece().walk().band_elements() * bits_of(piece().what().format.codes);
  return std::max<int64_t>(bits / 8 * static_cast<int64_t>(planes_.size()), 1);
}

Index PlaneWriter::bands_at_once() const {
  const bool transposes = std::ranges::any_of(planes_, [](const Plane& plane) { return plane.target.transposed; });
  const codec::BlockFormat& format = piece().what().format;
  const Index tile = transposes ? kTile / (format.one_scale() ? 1 : std::min(format.block_rows, kTile)) : 1;
  return std::max(WireReader::bands_at_once(), tile);
}

int64_t PlaneWriter::read_matrix(const std::byte* from, Index matrix, const Interval& bands) const {
  const int64_t bytes = for_each_box(matrix, bands, [&](const BlockBox& box) {
    for (const Plane& plane : planes_)
      plane.target.transposed ? transpose_codes(from, plane, box) : copy_codes(from, plane, box);
  });
  const Interval places = piece().walk().block_rows_of(bands);
  for (const Plane& plane : planes_) write_scales(from, plane, matrix, places);
  return bytes;
}

void PlaneWriter::copy_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const {
  const bool packed = piece().what().format.packed();
  const int64_t to = plane.codes.of(box);
  const Index odd = piece().odd(box) ? 1 : 0;  // the held region begins at whole bytes: it has the same nibbles
  for (Index r = 0; r < box.rows.size(); ++r) {
    const std::byte* source = from + piece().codes(box) + r * piece().row_bytes();
    const int64_t target = to + r * plane.code_row_elements;
    if (!packed) {
      std::memcpy(plane.target.codes + target, source, static_cast<size_t>(box.columns.size()));
      continue;
    }
    const Index end = odd + box.columns.size();
    if (odd != 0) put_nibble(plane.target.codes, target, nibble(source, 1));
    const Index first = odd * 2;
    const Index last = end / 2 * 2;
    if (first < last)
      std::memcpy(plane.target.codes + (target - odd + first) / 2, source + first / 2,
                  static_cast<size_t>((last - first) / 2));
    if (end % 2 != 0 && last >= first) put_nibble(plane.target.codes, target - odd + last, nibble(source, last));
  }
}

void PlaneWriter::transpose_codes(const std::byte* from, const Plane& plane, const BlockBox& box) const {
  const DType codes = piece().what().format.codes;
  const int64_t to = plane.codes.of(box);
  const std::byte* source = from + piece().codes(box);
  const auto tiles = [](Index begin, Index end, const auto& visit) {
    for (Index at = begin; at < end; at += kTile) visit(at, std::min(kTile, end - at));
  };
  if (!piece().what().format.packed()) {
    tiles(0, box.columns.size(), [&](Index column, Index columns) {
      codec::transpose_codes(codes, source + column, piece().row_bytes(), box.rows.size(), columns,
                             plane.target.codes + to + column * plane.code_row_elements, plane.code_row_elements);
    });
    return;
  }
  // Rows and columns that share a byte with others go one by one; all others are whole bytes on both sides.
  const Index odd = piece().odd(box) ? 1 : 0;
  const Index skipped_row = box.rows.begin % 2;
  const Index even_rows = (box.rows.size() - skipped_row) / 2 * 2;
  const Index even_columns = (box.columns.size() - odd) / 2 * 2;
  const auto one_by_one = [&](const Interval& some_rows, const Interval& some_columns) {
    for (Index c = some_columns.begin; c < some_columns.end; ++c)
      for (Index r = some_rows.begin; r < some_rows.end; ++r)
        put_nibble(plane.target.codes, to + c * plane.code_row_elements + r,
                   nibble(source + r * piece().row_bytes(), c + odd));
  };
  const Interval all_columns{0, box.columns.size()};
  one_by_one({0, skipped_row}, all_columns);
  one_by_one({skipped_row + even_rows, box.rows.size()}, all_columns);
  const Interval inner{skipped_row, skipped_row + even_rows};
  one_by_one(inner, {0, odd});
  one_by_one(inner, {odd + even_columns, box.columns.size()});
  if (even_rows == 0) return;
  tiles(odd, odd + even_columns, [&](Index column, Index columns) {
    codec::transpose_codes(
        codes, source + skipped_row * piece().row_bytes() + (column + odd) / 2, piece().row_bytes(), even_rows, columns,
        plane.target.codes + (to + column * plane.code_row_elements + skipped_row) / 2, plane.code_row_elements / 2);
  });
}

void PlaneWriter::write_scales(const std::byte* from, const Plane& plane, Index matrix, const Interval& places) const {
  const int64_t bytes = piece().what().format.scale_bytes();
  const bool repeated = piece().what().format.packed();
  const Index local_matrix = matrices_.of_matrix(matrix);
  std::byte* scales = plane.target.scales + local_matrix * plane.scale_matrix_bytes;
  const auto first = std::ranges::lower_bound(block_rows_, places.begin, {}, &Block::place);
  for (auto row = first; row != block_rows_.end() && row->place < places.end; ++row) {
    for (const Block& column : block_columns_) {
      const std::byte* scale = from + piece().scale(matrix, row->place, column.place);
      const Block& line = plane.target.transposed ? column : *row;
      const Block& along = plane.target.transposed ? *row : column;
      const Index block =
          plane.target.transposed ? piece().what().format.block_columns : piece().what().format.block_rows;
      const Index first_line = repeated ? line.local * block : line.local;
      for (Index l = 0; l < (repeated ? line.lines : 1); ++l)
        std::memcpy(scales + (first_line + l) * plane.scale_row_bytes + along.local * bytes, scale,
                    static_cast<size_t>(bytes));
    }
    if (plane.target.amaxes != nullptr && row == block_rows_.begin() && row->local == 0 && !block_columns_.empty() &&
        block_columns_.front().local == 0)
      std::memcpy(plane.target.amaxes + local_matrix * static_cast<Index>(sizeof(float)), from + piece().amax(matrix),
                  sizeof(float));
  }
}

}  // namespace tessera
