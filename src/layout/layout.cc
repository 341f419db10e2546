#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "base/fail.h"
#include "layout/partition.h"
#include "layout/text_reader.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

template <typename... Args>
[[noreturn]] void fail_bind(const Layout& layout, size_t axis, std::span<const Index> shape,
                            fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::kInvalidArgument, "layout {}, placement {} on shape {}: {}"_message,
       tessera::quoted(layout.to_string()), tessera::quoted(to_string(layout.placements()[axis])),
       to_string_shape(shape), fmt::format(format, std::forward<Args>(args)...));
}

// Records, axis by axis, how the axes to the left have cut each dim, and refuses what may not follow.
class Binder {
 public:
  Binder(const Layout& layout, std::span<const Index> shape) : layout_(layout), shape_(shape) {}

  // The dim that it shards, from 0; none if it shards none.
  std::optional<int> bind_axis(size_t axis) {
    const Placement& placement = layout_.placements()[axis];
    const std::optional<int> written = sharded_dim(placement);
    if (!written) return std::nullopt;
    const int dim = resolve(axis, *written);
    if (const auto* strided = std::get_if<StridedShard>(&placement)) check_strided(axis, *strided);
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) check_ragged(axis, *ragged, dim);
    count_cuts(axis, dim);
    return dim;
  }

 private:
  int resolve(size_t axis, int dim) const {
    const int ndim = static_cast<int>(shape_.size());
    if (dim < -ndim || dim >= ndim) fail_bind(layout_, axis, shape_, "there is no dim {} among {}", dim, ndim);
    return dim < 0 ? dim + ndim : dim;
  }

  void check_strided(size_t axis, const StridedShard& strided) const {
    if (strided.split_factor < 1 || strided.split_factor > kMaxElements) {
      fail_bind(layout_, axis, shape_, "a split factor is 1 to 2^62, not {}", strided.split_factor);
    }
  }

  void check_ragged(size_t axis, const RaggedShard& ragged, int dim) const {
    const Index size = shape_[static_cast<size_t>(dim)];
    const int axis_size = layout_.mesh().axes()[axis].size;
    const std::vector<Index>& bounds = ragged.bounds;
    if (cuts_[static_cast<size_t>(dim)].intervals != 0) {
      fail_bind(layout_, axis, shape_, "a ragged placement must be the leftmost on its dim");
    }
    if (bounds.size() != static_cast<size_t>(axis_size) + 1) {
      fail_bind(layout_, axis, shape_, "{} bounds for an axis of {}: it takes {}", bounds.size(), axis_size,
                axis_size + 1);
    }
    if (bounds.front() != 0 || bounds.back() != size) {
      fail_bind(layout_, axis, shape_, "the bounds go from {} to {} where the dim goes from 0 to {}", bounds.front(),
                bounds.back(), size);
    }
    const auto down = std::adjacent_find(bounds.begin(), bounds.end(), std::greater<>());
    if (down != bounds.end()) fail_bind(layout_, axis, shape_, "the bounds fall from {} to {}", *down, *(down + 1));
  }

  // Limits the number of intervals into which the dim falls, on which all later costs depend: this axis cuts every part
  // that the axes to the left have made again, for each rank and each piece of its split factor.
  void count_cuts(size_t axis, int dim) {
    Cuts& cuts = cuts_[static_cast<size_t>(dim)];
    const auto* strided = std::get_if<StridedShard>(&layout_.placements()[axis]);
    const Index size = std::max<Index>(shape_[static_cast<size_t>(dim)], 1);
    const Index pieces = strided != nullptr ? std::min(strided->split_factor, size) : 1;
    cuts.parts *= layout_.mesh().axes()[axis].size;  // at most kMaxRanks
    cuts.intervals += std::min(pieces, kMaxIntervals) * cuts.parts;
    if (pieces > kMaxIntervals || cuts.intervals > kMaxIntervals) {
      fail_bind(layout_, axis, shape_, "dim {} would be cut into more than {} intervals", dim, kMaxIntervals);
    }
  }

  // How the axes so far have cut a dim.
  struct Cuts {
    Index parts = 1;
    Index intervals = 0;  // an upper bound over all parts; 0 if no axis shards the dim
  };

  const Layout& layout_;
  std::span<const Index> shape_;
  std::array<Cuts, kMaxDims> cuts_{};  // one for each dim
};

}  // namespace

Layout::Layout(Mesh mesh, std::vector<Placement> placements) : mesh_(std::move(mesh)) {
  if (placements.size() != static_cast<size_t>(mesh_.ndim())) {
    fail(ErrorCode::kInvalidArgument, "{} placement{} for a mesh of {} axes: it takes one for each axis"_message,
         placements.size(), placements.size() == 1 ? "" : "s", mesh_.ndim());
  }
  if (!placements.empty()) placements_ = std::make_shared<const std::vector<Placement>>(std::move(placements));
}

bool Layout::operator==(const Layout& other) const {
  return mesh_ == other.mesh_ &&
         (placements_ == other.placements_ || std::ranges::equal(placements(), other.placements()));
}

size_t LayoutHash::operator()(const Layout& layout) const {
  size_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto mix = [&](size_t value) { hash = (hash ^ value) * 0x100000001b3; };
  const Mesh& mesh = layout.mesh();
  mix(static_cast<size_t>(mesh.size()));
  if (mesh.size() > 0) mix(static_cast<size_t>(mesh.ranks().front()));
  for (const Axis& axis : mesh.axes()) mix(static_cast<size_t>(axis.size));
  for (const Placement& placement : layout.placements()) {
    mix(placement.index());
    mix(static_cast<size_t>(sharded_dim(placement).value_or(kMaxDims)));
  }
  return hash;
}

bool Layout::has_partial() const {
  return partial_op().has_value();
}

std::optional<ReduceOp> Layout::partial_op() const {
  for (const Placement& placement : placements()) {
    if (const auto* partial = std::get_if<Partial>(&placement)) return partial->op;
  }
  return std::nullopt;
}

Layout Layout::bind(std::span<const Index> shape) const {
  element_count(shape);
  Binder binder(*this, shape);
  std::vector<Placement> bound;  // empty while it is unchanged
  for (size_t axis = 0; axis < placements().size(); ++axis) {
    const Placement& written = placements()[axis];
    const std::optional<int> dim = binder.bind_axis(axis);
    const auto* partial = std::get_if<Partial>(&written);
    if (partial != nullptr && partial->op != partial_op()) {
      fail_bind(*this, axis, shape, "another axis is partial by {}, and one tensor has one operation",
                tessera::to_string(*partial_op()));
    }
    if (!dim || dim == sharded_dim(written)) continue;
    if (bound.empty()) bound.assign(placements().begin(), placements().end());
    bound[axis] = with_dim(written, *dim);
  }
  return bound.empty() ? *this : Layout(mesh_, std::move(bound));
}

Layout Layout::with_ranks(std::vector<Rank> ranks) const {
  Layout moved = *this;
  moved.mesh_ = Mesh(std::vector<Axis>(mesh_.axes().begin(), mesh_.axes().end()), std::move(ranks));
  return moved;
}

Layout Layout::transposed(int dim, int other) const {
  std::vector<Placement> exchanged(placements().begin(), placements().end());
  for (Placement& placement : exchanged)
    std::visit(
        [&](auto& held) {
          if constexpr (requires { held.dim; }) {
            TESSERA_CHECK(held.dim >= 0);
            held.dim = held.dim == dim ? other : held.dim == other ? dim : held.dim;
          }
        },
        placement);
  return Layout(mesh_, std::move(exchanged));
}

Layout Layout::shifted(Rank offset) const {
  std::vector<Rank> ranks(mesh_.ranks().begin(), mesh_.ranks().end());
  for (Rank& rank : ranks) {
    if (__builtin_add_overflow(rank, offset, &rank) || rank < 0) {
      fail(ErrorCode::kInvalidArgument, "layout {}: its ranks cannot be shifted by {}"_message,
           tessera::quoted(to_string()), offset);
    }
  }
  return with_ranks(std::move(ranks));
}

Region Layout::owned(std::span<const Index> shape, Rank rank) const {
  const std::optional<int> position = mesh_.position_of(rank);
  if (!position) return Region::none(static_cast<int>(shape.size()));
  const std::vector<int> coordinate = mesh_.coordinate(*position);
  std::vector<IntervalSet> dims;
  dims.reserve(shape.size());
  for (const Index size : shape) dims.emplace_back(Interval{0, size});
  for (size_t axis = 0; axis < placements().size(); ++axis) {
    const std::optional<int> dim = sharded_dim(placements()[axis]);
    if (!dim) continue;
    TESSERA_CHECK(0 <= *dim && static_cast<size_t>(*dim) < dims.size());  // bound to this shape
    IntervalSet& set = dims[static_cast<size_t>(*dim)];
    set = part_of(set, placements()[axis], mesh_.axes()[axis].size, coordinate[axis]);
  }
  return Region(std::move(dims));
}

Shape Layout::local_shape(std::span<const Index> shape, Rank rank) const {
  return owned(shape, rank).extents();
}

}  // namespace tessera
