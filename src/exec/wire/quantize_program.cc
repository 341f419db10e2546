#include "exec/wire/quantize_program.h"

#include "base/fail.h"

namespace tessera {
namespace {

// The part of `held` in the blocks that `set` touches.
IntervalSet with_whole_blocks(const IntervalSet& set, const IntervalSet& held, Index origin, Index block) {
  const IntervalSet touched = touched_blocks(set, origin, block);
  std::vector<Interval> whole;
  for (const Interval& blocks : touched.intervals())
    whole.push_back({std::max<Index>(blocks.begin * block - origin, 0), blocks.end * block - origin});
  return held.intersect(IntervalSet::of_sorted(whole));
}

// The region that AmaxRun looks at.
WireRegion seen_around(const WireRegion& what, const Region& held) {
  WireRegion seen = what;
  if (what.format.one_scale() || what.region.empty()) return seen;
  std::vector<IntervalSet> dims(what.region.dims().begin(), what.region.dims().end());
  const size_t columns = dims.size() - 1;
  const size_t rows = columns - 1;
  const auto held_of = [&](size_t d) -> const IntervalSet& { return held.dim(static_cast<int>(d)); };
  dims[rows] = with_whole_blocks(dims[rows], held_of(rows), what.row0, what.format.block_rows);
  dims[columns] = with_whole_blocks(dims[columns], held_of(columns), what.column0, what.format.block_columns);
  seen.region = Region(std::move(dims));
  return seen;
}

bool holds(const IntervalSet& set, const Interval& interval) {
  return set.position_of(interval.end) - set.position_of(interval.begin) == interval.size();
}

// Places of touched blocks that `held` does not hold whole.
std::vector<Index> cut_places(const IntervalSet& touched, const IntervalSet& held, Index size, bool fused, Index origin,
                              Index block) {
  std::vector<Index> places;
  Index place = 0;
  for (const Interval& blocks : touched.intervals()) {
    for (Index b = blocks.begin; b < blocks.end; ++b, ++place) {
      Interval elements{b * block - origin, (b + 1) * block - origin};
      if (!fused) elements.end = std::min(elements.end, size);
      if (elements.begin < 0 || elements.end > size || !holds(held, elements)) places.push_back(place);
    }
  }
  return places;
}

int64_t element_bytes(const WireRegion& what) {
  return bytes_of(what.src_dtype, 1);
}

PartSize part_size(const BlockWalk& walk, const WireRegion& what) {
  return {.atoms = walk.all_bands(), .atom_bytes = std::max<int64_t>(walk.band_elements() * element_bytes(what), 1)};
}

}  // namespace

QuantizePart::QuantizePart(const QuantizeRoute& route)
    : tensor(route.tensor),
      piece(route.what),
      encoder(route.what.format, route.what.src_dtype),
      send(route.what, route.src.owned, route.src.strides),
      seen(seen_around(route.what, route.src.owned)),
      look(seen),
      look_at(seen, route.src.owned, route.src.strides) {
  extent_of(route.what.src_dtype, route.src.owned.extents(), route.src.strides);
  const WireRegion& what = route.what;
  if (route.planes) planes.emplace(piece, *route.planes);
  if (format().one_scale() || what.region.empty()) return;
  const BlockWalk& walk = piece.walk();
  const int columns = what.region.ndim() - 1;
  const int rows = columns - 1;
  cut_rows = cut_places(walk.block_rows(), route.src.owned.dim(rows), what.shape[static_cast<size_t>(rows)], what.fused,
                        what.row0, format().block_rows);
  cut_columns = cut_places(walk.block_columns(), route.src.owned.dim(columns), what.shape.back(), what.fused,
                           what.column0, format().block_columns);
}

QuantizeProgram::QuantizeProgram(std::span<const QuantizeRoute> routes) {
  auto impl = std::make_unique<Impl>();
  std::vector<PartSize> amax_sizes, encode_sizes;
  impl->parts.reserve(routes.size());
  for (const QuantizeRoute& route : routes) {
    const QuantizePart& part = impl->parts.emplace_back(route);
    amax_sizes.push_back(part_size(part.look, part.seen));
    encode_sizes.push_back(part_size(part.piece.walk(), route.what));
    impl->encode_bytes += part.piece.walk().elements() * element_bytes(route.what);
  }
  impl->amax_units = cut_into_units(amax_sizes);
  impl->encode_units = cut_into_units(encode_sizes);
  impl_ = std::move(impl);
}

QuantizeProgram::~QuantizeProgram() = default;

size_t QuantizeProgram::routes() const {
  return impl_->parts.size();
}

const WirePiece& QuantizeProgram::piece(size_t route) const {
  return impl_->parts[route].piece;
}

Index QuantizeProgram::matrix_of(size_t route, Index place) const {
  return impl_->parts[route].piece.tensor_matrix(place);
}

Index QuantizeProgram::cut_block_count(size_t route) const {
  const QuantizePart& part = impl_->parts[route];
  const BlockWalk& walk = part.piece.walk();
  const auto rows = static_cast<Index>(part.cut_rows.size());
  const auto columns = static_cast<Index>(part.cut_columns.size());
  return walk.matrices() * (rows * walk.block_columns().size() + (walk.block_rows().size() - rows) * columns);
}

std::vector<CutBlock> QuantizeProgram::cut_blocks(size_t route) const {
  const QuantizePart& part = impl_->parts[route];
  const BlockWalk& walk = part.piece.walk();
  std::vector<CutBlock> cut;
  cut.reserve(static_cast<size_t>(cut_block_count(route)));
  const auto blocks_at = [](const IntervalSet& set) {
    std::vector<Index> blocks;
    for (const Interval& interval : set.intervals())
      for (Index b = interval.begin; b < interval.end; ++b) blocks.push_back(b);
    return blocks;
  };
  const std::vector<Index> rows = blocks_at(walk.block_rows());
  const std::vector<Index> columns = blocks_at(walk.block_columns());
  for (Index m = 0; m < walk.matrices(); ++m) {
    const auto add = [&](Index row, Index column) {
      cut.push_back({matrix_of(route, m), rows[static_cast<size_t>(row)], columns[static_cast<size_t>(column)],
                     part.grid_place(m, row, column)});
    };
    auto next_cut = part.cut_rows.begin();
    for (Index row = 0; row < walk.block_rows().size(); ++row) {
      if (next_cut != part.cut_rows.end() && *next_cut == row) {
        ++next_cut;
        for (Index column = 0; column < walk.block_columns().size(); ++column) add(row, column);
      } else {
        for (const Index column : part.cut_columns) add(row, column);
      }
    }
  }
  return cut;
}

QuantizeAmaxes::QuantizeAmaxes(const QuantizeProgram& program) {
  size_t next = 0;
  const auto take = [&](std::vector<Range>& ranges, Index count) {
    ranges.push_back({next, static_cast<size_t>(count)});
    next += static_cast<size_t>(count);
  };
  for (size_t r = 0; r < program.routes(); ++r) {
    const WirePiece& piece = program.piece(r);
    const codec::BlockFormat& format = piece.what().format;
    take(matrices_, needs_amax(format.spec.format) ? piece.walk().matrices() : 0);
    take(blocks_, format.one_scale() ? 0 : piece.walk().matrices() * piece.walk().blocks());
  }
  values_.resize(next);
}

}  // namespace tessera
