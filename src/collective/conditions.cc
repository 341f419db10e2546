#include "collective/conditions.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tessera::collective {

bool WordsCondition::met() const {
  if (reached()) return true;
  group_->status().throw_if_error();
  std::vector<int> ended;  // looked at before the words are read once more, which then are its last ones
  for (const int rank : awaited())
    if (group_->is_final(rank)) ended.push_back(rank);
  if (ended.empty()) return false;
  if (reached()) return true;
  for (const int rank : awaited())
    if (std::ranges::find(ended, rank) != ended.end()) group_->require_present(rank);
  return false;
}

void WordsCondition::check() const {
  if (!is_meeting()) return;
  std::vector<int> elsewhere = group_->called_next(awaited());
  if (elsewhere.empty()) return;
  const std::vector<int> late = awaited();  // again: a rank may have stored its word, and then made its call
  std::erase_if(elsewhere, [&](int rank) { return std::ranges::find(late, rank) == late.end(); });
  if (!elsewhere.empty()) group_->refuse_difference(elsewhere.front(), to_string());
}

ReachedCondition::ReachedCondition(std::shared_ptr<const Group> group, std::vector<int> ranks, Word word, uint32_t slot,
                                   uint64_t value, std::string what)
    : WordsCondition(std::move(group)),
      ranks_(std::move(ranks)),
      word_(word),
      slot_(slot),
      value_(value),
      what_(std::move(what)) {}

std::string ReachedCondition::to_string() const {
  if (is_meeting()) return fmt::format("rank{} {} {}", ranks_.size() == 1 ? "" : "s", fmt::join(ranks_, ", "), what_);
  return fmt::format("rank{} {}: {} {}", ranks_.size() == 1 ? "" : "s", fmt::join(ranks_, ", "),
                     collective::to_string(word_), what_);
}

void ReachedCondition::note(device::WaitNotes& notes) const {
  for (const int rank : ranks_) notes.edges.push_back(group().edge(rank, word_, slot_, value_));
  notes.say(to_string());
}

std::vector<int> ReachedCondition::awaited() const {
  std::vector<int> late = ranks_;
  std::erase_if(late, [&](int rank) { return group().get(rank, word_, slot_) >= value_; });
  return late;
}

}  // namespace tessera::collective
