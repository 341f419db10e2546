// The layout algebra: how the elements of a tensor lie on the ranks of a mesh. Pure values: no I/O, no threads.
//
// The semantics are those of PyTorch's DTensor (torch/distributed/tensor/placement_types.py): Shard splits like
// torch.chunk, several mesh axes on one tensor dim nest left to right, StridedShard reorders that nesting. What a rank
// owns is, per tensor dim, a sorted list of half-open intervals; the owned set is their product. A local tensor holds
// its owned elements in ascending global order, row-major.
//
// All types are values, comparable and thread-compatible; copies share their contents, so they are cheap. Errors are
// tessera::Error(kInvalidArgument).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera {

using Rank = int32_t;
using Index = int64_t;
using Shape = std::vector<Index>;  // one size a dim; {} is a scalar; sizes may be 0

inline constexpr int kMaxDims = 8;                      // of a tensor
inline constexpr int kMaxAxes = 8;                      // of a mesh
inline constexpr int kMaxRanks = 1 << 20;               // of a mesh
inline constexpr Index kMaxElements = Index{1} << 62;   // of a tensor
inline constexpr Index kMaxIntervals = Index{1} << 24;  // that a layout may cut one dim into, all ranks together

// Product of the sizes. Throws if a size is negative, there are more than kMaxDims, or the product exceeds
// kMaxElements. In that check a size of 0 counts as 1, so no stride overflows either.
Index element_count(std::span<const Index> shape);
std::string to_string_shape(std::span<const Index> shape);  // "4096x4096", "scalar"
Shape parse_shape(std::string_view text);

// [begin, end), in elements along one dim.
struct Interval {
  Index begin = 0;
  Index end = 0;
  Index size() const { return end - begin; }
  auto operator<=>(const Interval&) const = default;
};

// Sorted, disjoint, non-empty and non-adjacent intervals: equal sets are equal values.
class IntervalSet {
 public:
  IntervalSet() = default;
  explicit IntervalSet(Interval interval);
  // Takes intervals in ascending order; drops empty ones and merges those that touch.
  static IntervalSet of_sorted(std::span<const Interval> intervals);

  // Valid as long as this object.
  std::span<const Interval> intervals() const {
    return several_ ? std::span<const Interval>(several_->list) : std::span(&only_, size_ > 0 ? 1 : 0);
  }
  bool empty() const { return size_ == 0; }
  Index size() const { return size_; }
  bool contains(Index element) const;
  // Number of elements of the set below `element`: the local index of an owned element. O(log intervals).
  Index position_of(Index element) const;
  // The elements at positions [first, last) of the set. REQUIRES: 0 <= first <= last <= size().
  IntervalSet slice(Index first, Index last) const;
  void append_slice(Index first, Index last, std::vector<Interval>& out) const;  // the same, appended to `out`
  IntervalSet intersect(const IntervalSet& other) const;
  bool operator==(const IntervalSet& other) const;

 private:
  struct Several {
    std::vector<Interval> list;
    std::vector<Index> before;  // elements of the set below each interval
  };
  Interval only_;                           // where there is one
  std::shared_ptr<const Several> several_;  // where there are two or more
  Index size_ = 0;
};

// The product of one IntervalSet for each dim. A 0-d region (no dims) holds one element unless it is `none`.
class Region {
 public:
  Region() = default;  // 0-d, one element
  explicit Region(std::vector<IntervalSet> dims);
  static Region full(std::span<const Index> shape);
  // An empty region of `ndim` dims (for a 0-d tensor, too).
  static Region none(int ndim);

  int ndim() const { return static_cast<int>(dims().size()); }
  const IntervalSet& dim(int d) const { return (*dims_)[static_cast<size_t>(d)]; }
  std::span<const IntervalSet> dims() const { return dims_ ? std::span(*dims_) : std::span<const IntervalSet>(); }
  bool empty() const;
  Index size() const;     // elements
  Shape extents() const;  // elements a dim: the shape of the local tensor
  Region intersect(const Region& other) const;
  std::string to_string() const;  // "[0:4,8:12][0:16]"
  bool operator==(const Region& other) const;

 private:
  std::shared_ptr<const std::vector<IntervalSet>> dims_;  // null where there are none
  bool none_ = false;
};

// --- placements ----------------------------------------------------------------------------------

// Users may write a negative dim (-1 is the last); Layout::bind resolves it.
struct Shard {
  int dim = 0;
  bool operator==(const Shard&) const = default;
};
// DTensor's _StridedShard: chunk the dim by split_factor, then each piece by the axis; a rank concatenates its pieces.
struct StridedShard {
  int dim = 0;
  Index split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};
// Explicit boundaries: k+1 non-decreasing bounds from 0 to the dim's size for an axis of k ranks. Must be the outermost
// (leftmost) axis on its dim; axes to the right of it split its pieces.
struct RaggedShard {
  int dim = 0;
  std::vector<Index> bounds;
  bool operator==(const RaggedShard&) const = default;
};
struct Replicate {
  bool operator==(const Replicate&) const = default;
};
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct };
std::string_view to_string(ReduceOp op);  // "sum", "avg", "min", "max", "product"
// Every rank along the axis holds a term of each element.
struct Partial {
  ReduceOp op = ReduceOp::kSum;
  bool operator==(const Partial&) const = default;
};
using Placement = std::variant<Replicate, Shard, StridedShard, RaggedShard, Partial>;
std::string to_string(const Placement& placement);  // "R", "S0", "S0*2", "G0[0;16;32]", "Psum"

// --- mesh ----------------------------------------------------------------------------------------

struct Axis {
  std::string name;  // may be empty
  int size = 1;
  bool operator==(const Axis&) const = default;
};

// An n-d array of distinct ranks, row-major, with optional axis names.
class Mesh {
 public:
  Mesh() = default;  // no axes, no ranks
  // Throws unless ranks are distinct, non-negative and as many as the product of the axes' sizes.
  Mesh(std::vector<Axis> axes, std::vector<Rank> ranks);
  // Ranks first, first+1, ...
  explicit Mesh(std::vector<Axis> axes, Rank first = 0);

  std::span<const Axis> axes() const { return body_ ? std::span(body_->axes) : std::span<const Axis>(); }
  int ndim() const { return static_cast<int>(axes().size()); }
  int size() const { return static_cast<int>(ranks().size()); }
  std::span<const Rank> ranks() const { return body_ ? std::span(body_->ranks) : std::span<const Rank>(); }
  // Row-major position of a rank in the mesh; nullopt if it is not in the mesh. O(log size).
  std::optional<int> position_of(Rank rank) const;
  // Coordinate along every axis of the rank at a row-major position.
  std::vector<int> coordinate(int position) const;
  bool operator==(const Mesh& other) const;

 private:
  struct Body {
    std::vector<Axis> axes;
    std::vector<Rank> ranks;
    std::vector<std::pair<Rank, int>> positions;  // sorted; empty where ranks are consecutive
  };
  std::shared_ptr<const Body> body_;  // null where there are no axes
};

// --- layout --------------------------------------------------------------------------------------

// A mesh and one placement for each of its axes.
class Layout {
 public:
  Layout() = default;
  // Throws unless there is one placement for each axis. bind() checks what depends on the shape.
  Layout(Mesh mesh, std::vector<Placement> placements);

  // "dp=2,tp=4@0-7:R,S1". Axes `name=size` or `size`; ranks `0-3`, `0,2,4-6` or left out with their '@' (0..n-1).
  // Errors name the text, the position (in bytes, from 1) and what was expected there.
  static Layout parse(std::string_view text);
  std::string to_string() const;  // parse(to_string()) == *this

  const Mesh& mesh() const { return mesh_; }
  std::span<const Placement> placements() const {
    return placements_ ? std::span(*placements_) : std::span<const Placement>();
  }
  bool has_partial() const;
  // The op of the Partial axes, if any. (bind() refuses different ops on two axes of one tensor.)
  std::optional<ReduceOp> partial_op() const;

  // The same layout with negative dims resolved for `shape`, after every check that needs a shape: dims in range,
  // ragged bounds, one op. Throws Error(kInvalidArgument) that names the placement and the value.
  Layout bind(std::span<const Index> shape) const;
  // The same placements over other ranks: position i of the mesh becomes ranks[i].
  Layout with_ranks(std::vector<Rank> ranks) const;
  // The layout of the tensor with two dims exchanged. REQUIRES: no negative dims
  Layout transposed(int dim, int other) const;
  // Ranks shifted by `offset`, e.g. to number a second job's ranks behind the first's.
  Layout shifted(Rank offset) const;

  // The region that `rank` owns; Region::none for a rank outside the mesh. REQUIRES: bound to `shape`.
  Region owned(std::span<const Index> shape, Rank rank) const;
  // Shape of that rank's local tensor: owned().extents().
  Shape local_shape(std::span<const Index> shape, Rank rank) const;
  bool operator==(const Layout& other) const;

 private:
  Mesh mesh_;
  std::shared_ptr<const std::vector<Placement>> placements_;  // null where there are none
};

// For tables by layout: a model's tensors have a few dozen.
struct LayoutHash {
  size_t operator()(const Layout& layout) const;
};

// The parts into which the mesh axes that shard tensor dim `dim` cut it: one IntervalSet for each combination of
// coordinates along those axes, row-major over `axes` (the mesh axes, ascending). Parts are disjoint and cover the dim.
// REQUIRES: `layout` is bound. O(number of intervals).
struct DimPartition {
  std::vector<int> axes;
  std::vector<IntervalSet> parts;
};
DimPartition partition_dim(const Layout& layout, Index dim_size, int dim);

// --- slices --------------------------------------------------------------------------------------

// A slice of one tensor dim: elements begin, begin + step, ... below end. A dropped dim is reduced to a single element
// and is not a dim of the result: end is begin + 1, step 1.
struct Slice {
  Index begin = 0;
  Index end = 0;
  Index step = 1;
  bool dropped = false;
  Index size() const { return (end - begin + step - 1) / step; }
  bool operator==(const Slice&) const = default;
};
std::string to_string(std::span<const Slice> slices);  // as Python has it between brackets: "0:4, 7, 0:8:2"

// The shape of the slice. Throws unless there is one slice for each dim of `shape`, each inside it and ascending.
Shape sliced_shape(std::span<const Index> shape, std::span<const Slice> slices);

// The layout of a slice as a separate tensor: each rank holds a view of its part of the whole. If part of a dim is
// taken, and one mesh axis shards the dim contiguously, it becomes a RaggedShard by that axis. Only some ranks hold a
// given element of a sharded dim, so dropping the dim drops those axes and the other ranks. Throws as sliced_shape()
// and bind() do, and Error(kUnimplemented) for a part of a dim that several axes shard, or that is sharded
// non-contiguously or sliced with a step: no layout describes that.
Layout sliced_layout(const Layout& layout, std::span<const Index> shape, std::span<const Slice> slices);

// The slice within the local tensor of `rank`. REQUIRES: sliced_layout() does not throw, and gives the rank elements.
std::vector<Slice> local_slices(const Layout& layout, std::span<const Index> shape, std::span<const Slice> slices,
                                Rank rank);

}  // namespace tessera
