// The ranks of one side of a picture: a box for each or, if there are many, for several consecutive ones.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera::plan {

class RankBoxes {
 public:
  // The ranks of the layout's mesh, ascending, in at most `most` boxes of equal size (the last one may be smaller).
  RankBoxes(const Layout& layout, size_t most);

  size_t size() const { return boxes_.size(); }
  size_t box_of(Rank rank) const { return box_of_.at(rank); }
  std::span<const Rank> ranks(size_t box) const { return boxes_[box]; }

 private:
  std::vector<std::vector<Rank>> boxes_;
  std::map<Rank, size_t> box_of_;
};

}  // namespace tessera::plan
