#include "plan/rank_boxes.h"

#include <algorithm>

namespace tessera::plan {

RankBoxes::RankBoxes(const Layout& layout, size_t most) {
  std::vector<Rank> ranks(layout.mesh().ranks().begin(), layout.mesh().ranks().end());
  std::ranges::sort(ranks);
  const size_t per_box = (ranks.size() + most - 1) / most;
  boxes_.resize((ranks.size() + per_box - 1) / per_box);
  for (size_t i = 0; i < ranks.size(); ++i) {
    boxes_[i / per_box].push_back(ranks[i]);
    box_of_[ranks[i]] = i / per_box;
  }
}

}  // namespace tessera::plan
