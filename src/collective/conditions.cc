#include "collective/conditions.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tessera::collective {

ReachedCondition::ReachedCondition(std::shared_ptr<const Group> group, std::vector<int> ranks, Word word, uint32_t slot,
                                   uint64_t value, std::string what)
    : WordsCondition(std::move(group)),
      ranks_(std::move(ranks)),
      word_(word),
      slot_(slot),
      value_(value),
      what_(std::move(what)) {}

bool ReachedCondition::met() const {
  for (const int rank : ranks_) {
    const bool left = group().has_left(rank);
    if (group().get(rank, word_, slot_) >= value_) continue;
    if (left)
      group().require_present(rank);
    else
      group().status().throw_if_error();
    return false;
  }
  return true;
}

std::string ReachedCondition::to_string() const {
  return fmt::format("rank{} {}: {} {}", ranks_.size() == 1 ? "" : "s", fmt::join(ranks_, ", "),
                     collective::to_string(word_), what_);
}

std::vector<device::WordEdge> ReachedCondition::edges() const {
  std::vector<device::WordEdge> edges;
  for (const int rank : ranks_) edges.push_back(group().edge(rank, word_, slot_, value_));
  return edges;
}

std::vector<int> ReachedCondition::awaited() const {
  std::vector<int> late = ranks_;
  std::erase_if(late, [&](int rank) { return group().get(rank, word_, slot_) >= value_; });
  return late;
}

}  // namespace tessera::collective
