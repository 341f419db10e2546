#include "plan/kind.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::plan {
namespace {

int64_t bits_of_256(const TensorMeta& meta) {
  if (!meta.wire) return 256 * int64_t{bits_of(meta.dtype)};
  const QuantSpec spec{.format = *meta.wire};
  const PlaneShape plane = plane_shape(spec, Plane::kRow, 2, 2);
  const BlockShape block = block_shape(spec, Plane::kRow);
  const int64_t codes = 256 * int64_t{bits_of(plane.code_dtype)};
  if (block.rows == 0) return codes;
  const int64_t elements = block.rows * block.columns;
  return codes + (256 * bits_of(plane.scale_dtype) + elements - 1) / elements;
}

}  // namespace

Kind::Kind(TensorMeta meta, std::shared_ptr<const LayoutPair> pair)
    : meta_(std::move(meta)), pair_(std::move(pair)), bits256_(bits_of_256(meta_)) {
  for (size_t d = 0; d < meta_.shape.size(); ++d) {
    const int dim = static_cast<int>(d);
    dims_.emplace_back(partition_dim(pair_->src(), meta_.shape[d], dim),
                       partition_dim(pair_->dst(), meta_.shape[d], dim));
  }
  set_granules();
  set_bounds();
}

// A packed 4-bit element shares its byte with its neighbour in memory, and every rank packs its own local tensor. So a
// contiguous run of elements moves as whole bytes if it begins and ends at an even position on both sides. Let `cut` be
// the last dim that a layout cuts, and a row everything below one index of a dim: rows below `cut` are whole
// everywhere, and every edge of a part must be at an even number of elements.
void Kind::set_granules() {
  granules_.fill(1);
  if (bits_of(meta_.dtype) >= 8 || std::ranges::count(meta_.shape, 0) > 0) return;
  const auto is_cut = [](const DimOverlaps& dim, Index size) {
    return std::ranges::any_of(dim.edges(), [&](Index edge) { return edge != 0 && edge != size; });
  };
  const Shape& shape = meta_.shape;
  size_t cut = 0;
  for (size_t d = 0; d < shape.size(); ++d)
    if (is_cut(dims_[d], shape[d])) cut = d;
  if (shape.empty()) fail(ErrorCode::kInvalidArgument, "a {} scalar is half a byte"_message, to_string(meta_.dtype));

  Index row = 1;
  for (size_t d = shape.size(); d-- > cut;) {
    const bool even = row * shape[d] % 2 == 0;
    granules_[d] = !even ? 0 : row % 2 == 0 ? 1 : 2;
    if (d > cut) row *= shape[d];
  }
  for (const Index edge : dims_[cut].edges()) {
    if (edge * row % 2 == 0) continue;
    if (edge == shape[cut] && cut == 0)
      fail(ErrorCode::kInvalidArgument, "{} of shape {} ends in the middle of a byte"_message, to_string(meta_.dtype),
           to_string_shape(shape));
    fail(
        ErrorCode::kInvalidArgument,
        "{} of shape {} is cut inside a byte, at element {} of dim {}: use a layout that cuts it at even places or not "
        "at all"_message,
        to_string(meta_.dtype), to_string_shape(shape), edge, cut);
  }
}

// `before` follows from sizes: earlier entries in dim d's list, times this cell in the dims above, times all that the
// class owns in the dims below.
void Kind::complete(Cell& cell) const {
  const Holders& sources = pair_->sources();
  const Holders& destinations = pair_->destinations();
  cell.cls = cell.group = 0;
  cell.size = 1;
  cell.before = 0;
  for (int d = 0; d < ndim(); ++d) {
    const Overlap& overlap = *cell.dims[static_cast<size_t>(d)];
    cell.cls += overlap.src * sources.stride(d);
    cell.group += overlap.dst * destinations.stride(d);
    cell.before = cell.before * dim(d).source_size(overlap.src) + cell.size * overlap.before;
    cell.size *= overlap.size;
  }
}

bool Kind::find_cell(int cls, int group, Cell& cell) const {
  for (int d = 0; d < ndim(); ++d) {
    const Overlap* overlap = dim(d).find(pair_->sources().part(cls, d), pair_->destinations().part(group, d));
    if (overlap == nullptr) return false;
    cell.dims[static_cast<size_t>(d)] = overlap;
  }
  complete(cell);
  return true;
}

Index Kind::class_size(int cls) const {
  Index size = 1;
  for (int d = 0; d < ndim(); ++d) size *= dim(d).source_size(pair_->sources().part(cls, d));
  return size;
}

Index Kind::group_size(int group) const {
  Index size = 1;
  for (int d = 0; d < ndim(); ++d) {
    Index extent = 0;
    for (const Overlap* overlap : dim(d).of_destination(pair_->destinations().part(group, d))) extent += overlap->size;
    size *= extent;
  }
  return size;
}

template <typename Visit>
void Kind::for_each_self_served(int cls, Visit visit) const {
  const auto shared = pair_->shared(cls);
  for (size_t first = 0; first < shared.size();) {
    const int group = shared[first].group;
    size_t next = first;
    while (next < shared.size() && shared[next].group == group) ++next;
    // With a Partial source one destination can be the owner; the others need what it has reduced.
    Cell cell;
    if (find_cell(cls, group, cell)) visit(cell, pair_->partial() ? 1 : static_cast<int>(next - first));
    first = next;
  }
}

Index Kind::class_needed(int cls) const {
  Index needed = class_size(cls);
  for_each_self_served(cls, [&](const Cell& cell, int self_served) {
    if (self_served == pair_->destinations().members()) needed -= cell.size;
  });
  return needed;
}

void Kind::set_bounds() {
  const Holders& sources = pair_->sources();
  const Holders& destinations = pair_->destinations();
  for (int group = 0; group < destinations.classes(); ++group)
    lower_bound_ += bytes(group_size(group)) * destinations.members();
  const int members = sources.members();
  for (int cls = 0; cls < sources.classes(); ++cls) {
    for_each_self_served(cls,
                         [&](const Cell& cell, int self_served) { lower_bound_ -= bytes(cell.size) * self_served; });
    egress_bound_ = std::max(egress_bound_, (bytes(class_needed(cls)) + members - 1) / members);
  }
}

size_t Kind::memory_bytes() const {
  size_t bytes = sizeof(Kind);
  for (const DimOverlaps& dim : dims_) bytes += sizeof(dim) + dim.memory_bytes();
  return bytes;
}

}  // namespace tessera::plan
