#include "bus/registration/layout_table.h"

#include "base/fail.h"

namespace tessera::bus {
namespace {

constexpr size_t kMaxLayoutRanks = size_t{1} << 24;
constexpr size_t kMaxBounds = size_t{1} << 26;

}  // namespace

void LayoutTable::add(const Layout& layout) {
  if (lacking_ == Lacking::kAllowed && layout == Layout{}) return numbers_.push_back(kNone);
  const auto [it, added] = number_of_.try_emplace(layout, static_cast<uint32_t>(texts_.size()));
  if (added) texts_.push_back(layout.to_string());
  numbers_.push_back(it->second);
}

void LayoutTable::parse() {
  size_t ranks = 0;
  for (const std::string& text : texts_) {
    layouts_.push_back(Layout::parse(text));
    ranks += layouts_.back().mesh().ranks().size();
    if (ranks > kMaxLayoutRanks)
      fail(ErrorCode::kInvalidArgument, "{}: its layouts have more than {} ranks together"_message, what_,
           kMaxLayoutRanks);
  }
}

Layout LayoutTable::take(uint32_t number, std::string_view tensor) {
  if (lacking_ == Lacking::kAllowed && number == kNone) return {};
  if (number >= layouts_.size())
    fail(ErrorCode::kInvalidArgument, "{}: tensor {} refers to layout {} of {}"_message, what_, tensor, number,
         layouts_.size());
  for (const Placement& placement : layouts_[number].placements())
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) bounds_ += ragged->bounds.size();
  if (bounds_ > kMaxBounds)
    fail(ErrorCode::kInvalidArgument, "{}: the ragged shards of its tensors have more than {} bounds together"_message,
         what_, kMaxBounds);
  return layouts_[number];
}

}  // namespace tessera::bus
