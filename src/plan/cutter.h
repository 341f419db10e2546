// Cuts one cell - the product of one IntervalSet for each dim - into boxes that several ranks serve.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera::plan {

// Positions [first, last) in the IntervalSet of every dim.
struct Box {
  std::array<Index, kMaxDims> first{};
  std::array<Index, kMaxDims> last{};
};

struct CutRules {
  // A dim may be cut at multiples of its granule; 0: it may not be cut.
  std::array<Index, kMaxDims> granule{};
  Index share = 0;      // elements that one rank serves in total: a cut may be off by 1/64 of it
  Index min_piece = 1;  // elements in a piece, unless it is the whole cell
};

// Cuts a cell at ascending places, counted in elements of its row-major order. If some dim is fine enough for all
// places, the cell is cut along the first such dim, and each piece is one box. Otherwise a cut goes through the slice
// that it falls into, and on through the next dims, so that it is exact and a piece may be several boxes.
class Cutter {
 public:
  // `places` holds the inner cuts: 0 < place < the cell's size, ascending.
  Cutter(std::span<const Index> extents, std::span<const Index> places, const CutRules& rules);

  // Appends the boxes of piece k, between cuts k-1 and k (or the cell's ends), to `boxes`.
  void append_piece(size_t k, std::vector<Box>& boxes) const;

 private:
  using Point = std::array<Index, kMaxDims>;  // the ends of pieces, in lexicographic order

  int first_fine_dim(std::span<const Index> places) const;
  Index snap(Index place, Index size, Index unit) const;
  bool can_cut_below(int dim) const;
  Point point_at(Index place) const;
  Index elements_before(const Point& point) const;
  Box whole() const;

  int ndim_;
  CutRules rules_;
  std::array<Index, kMaxDims> extent_{};
  std::array<Index, kMaxDims> slice_{};  // by dim: elements of one slice (one index along the dim)
  Index size_ = 1;
  int dim_;                   // the dim of all cuts; -1: they go through several
  std::vector<Index> cut_;    // along dim_, with both ends
  std::vector<Point> point_;  // with both ends
};

}  // namespace tessera::plan
