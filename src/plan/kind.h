// The batch level of the planner: what all tensors of one shape, dtype and pair of layouts share.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <type_traits>
#include <vector>

#include "plan/cutter.h"
#include "plan/layout_pair.h"
#include "plan/overlaps.h"
#include "tessera/plan.h"

namespace tessera::plan {

// The intersection of one holder class and one destination group: one overlap in each dim.
struct Cell {
  int cls = 0;
  int group = 0;
  Index size = 1;    // elements
  Index before = 0;  // elements of the class in earlier cells
  std::array<const Overlap*, kMaxDims> dims{};
};

class Kind {
 public:
  // REQUIRES: the layouts of `pair` are bound to the shape. Throws if they cut a byte.
  Kind(TensorMeta meta, std::shared_ptr<const LayoutPair> pair);

  const TensorMeta& meta() const { return meta_; }
  const LayoutPair& pair() const { return *pair_; }
  const std::shared_ptr<const LayoutPair>& shared_pair() const { return pair_; }
  int ndim() const { return static_cast<int>(dims_.size()); }
  const DimOverlaps& dim(int d) const { return dims_[static_cast<size_t>(d)]; }
  // On the wire: the size of codes and scales if they are quantised.
  int64_t bits(Index elements) const { return elements / 256 * bits256_ + elements % 256 * bits256_ / 256; }
  int64_t bytes(Index elements) const { return bits(elements) / 8; }
  int64_t source_bytes(Index elements) const { return elements * bits_of(meta_.dtype) / 8; }  // as a source holds them
  // The fewest elements that take `bytes`.
  Index elements(int64_t bytes) const {
    return (std::min(bytes, int64_t{1} << 51) * 8 * 256 + bits256_ - 1) / bits256_;
  }
  // The positions of each dim at which a cell may be cut.
  const std::array<Index, kMaxDims>& granules() const { return granules_; }

  Index class_size(int cls) const;    // elements that a member of the class owns
  Index group_size(int group) const;  // elements that a destination of the group owns
  // Elements of the class's cells that some destination needs and does not hold, each cell once.
  Index class_needed(int cls) const;
  // Bytes that destinations do not hold themselves, summed over destinations.
  int64_t lower_bound() const { return lower_bound_; }
  // The most bytes that a member of any class must serve: max over classes c of ceil(needed bytes of c / members).
  int64_t egress_bound() const { return egress_bound_; }

  // Visits the cells of a class, in canonical order.
  template <typename Visit>  // void(const Cell&)
  void for_each_cell_of_class(int cls, Visit visit) const;
  // Visits the cells that a destination group needs, ascending by class.
  template <typename Visit>
  void for_each_cell_of_group(int group, Visit visit) const;
  // The cell of a class and a group; false if they have no element in common.
  bool find_cell(int cls, int group, Cell& cell) const;

  size_t memory_bytes() const;

 private:
  void set_granules();
  void set_bounds();
  void complete(Cell& cell) const;
  // Visits every group that intersects the class: the cell, and how many of its destinations hold it themselves.
  template <typename Visit>  // void(const Cell&, int self_served)
  void for_each_self_served(int cls, Visit visit) const;
  template <typename List, typename Visit>
  void for_each_product(const List* lists, Visit visit) const;

  TensorMeta meta_;
  std::shared_ptr<const LayoutPair> pair_;
  int64_t bits256_;  // for 256 elements, since scales take a fraction of a bit for each element
  std::vector<DimOverlaps> dims_;
  std::array<Index, kMaxDims> granules_{};
  int64_t lower_bound_ = 0;
  int64_t egress_bound_ = 0;
};

// Calls `visit` with every combination of one entry from each list, the last list fastest.
template <typename List, typename Visit>
void Kind::for_each_product(const List* lists, Visit visit) const {
  Cell cell;
  std::array<size_t, kMaxDims> at{};
  const auto ndim = dims_.size();
  for (size_t d = 0; d < ndim; ++d)
    if (lists[d].empty()) return;
  while (true) {
    for (size_t d = 0; d < ndim; ++d) {
      if constexpr (std::is_pointer_v<typename List::value_type>)
        cell.dims[d] = lists[d][at[d]];
      else
        cell.dims[d] = &lists[d][at[d]];
    }
    complete(cell);
    visit(static_cast<const Cell&>(cell));
    size_t d = ndim;
    while (d > 0 && ++at[d - 1] == lists[d - 1].size()) at[--d] = 0;
    if (d == 0) return;
  }
}

template <typename Visit>
void Kind::for_each_cell_of_class(int cls, Visit visit) const {
  std::array<std::span<const Overlap>, kMaxDims> lists;
  for (size_t d = 0; d < dims_.size(); ++d)
    lists[d] = dims_[d].of_source(pair_->sources().part(cls, static_cast<int>(d)));
  for_each_product(lists.data(), visit);
}

template <typename Visit>
void Kind::for_each_cell_of_group(int group, Visit visit) const {
  std::array<std::span<const Overlap* const>, kMaxDims> lists;
  for (size_t d = 0; d < dims_.size(); ++d)
    lists[d] = dims_[d].of_destination(pair_->destinations().part(group, static_cast<int>(d)));
  for_each_product(lists.data(), visit);
}

}  // namespace tessera::plan
