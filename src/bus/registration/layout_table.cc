#include "bus/registration/layout_table.h"

#include "base/fail.h"
#include "bus/registration/manifest.h"

namespace tessera::bus {
namespace {

constexpr uint32_t kMaxLayoutText = uint32_t{1} << 20;
constexpr size_t kMaxLayoutRanks = size_t{1} << 24;
constexpr size_t kMaxBounds = size_t{1} << 26;

}  // namespace

uint32_t LayoutTableWriter::add(const Layout& layout) {
  const auto [it, added] = numbers_.try_emplace(layout.to_string(), static_cast<uint32_t>(texts_.size()));
  if (added) texts_.push_back(it->first);
  return it->second;
}

void LayoutTableWriter::write(ByteWriter& out) const {
  out.put(static_cast<uint32_t>(texts_.size()));
  for (const std::string& text : texts_) out.put_string(text);
}

LayoutTable LayoutTable::read(ByteReader& in, std::string_view what) {
  LayoutTable table;
  table.what_ = what;
  size_t ranks = 0;
  for (uint32_t count = in.get_count(kMaxTensors, sizeof(uint32_t)); count > 0; --count) {
    table.layouts_.push_back(Layout::parse(in.get_string(kMaxLayoutText)));
    ranks += table.layouts_.back().mesh().ranks().size();
    if (ranks > kMaxLayoutRanks)
      fail(ErrorCode::kInvalidArgument, "{}: its layouts have more than {} ranks together", what, kMaxLayoutRanks);
  }
  return table;
}

const Layout& LayoutTable::take(uint32_t number, std::string_view tensor) {
  if (number >= layouts_.size())
    fail(ErrorCode::kInvalidArgument, "{}: tensor {} refers to layout {} of {}", what_, tensor, number,
         layouts_.size());
  for (const Placement& placement : layouts_[number].placements())
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) bounds_ += ragged->bounds.size();
  if (bounds_ > kMaxBounds)
    fail(ErrorCode::kInvalidArgument, "{}: the ragged shards of its tensors have more than {} bounds together", what_,
         kMaxBounds);
  return layouts_[number];
}

}  // namespace tessera::bus
