#include <algorithm>

#include "fuzz/targets.h"
#include "tessera/layout.h"

namespace tessera::fuzz {
namespace {

constexpr int kFewRanks = 64;
constexpr Index kFewElements = 1 << 12;  // in each dim

bool is_small(const Layout& layout, const Shape& shape) {
  return layout.mesh().size() <= kFewRanks &&
         std::ranges::all_of(shape, [](Index size) { return size <= kFewElements; });
}

// As many ranks hold each element as the axes that do not shard it have coordinates.
void check_ownership(const Layout& layout, const Shape& shape) {
  Index copies = 1;
  for (size_t axis = 0; axis < layout.placements().size(); ++axis) {
    const Placement& placement = layout.placements()[axis];
    if (std::holds_alternative<Replicate>(placement) || std::holds_alternative<Partial>(placement))
      copies *= layout.mesh().axes()[axis].size;
  }
  Index owned = 0;
  for (const Rank rank : layout.mesh().ranks()) {
    const Region region = layout.owned(shape, rank);
    TESSERA_CHECK_EQ(region.size(), element_count(layout.local_shape(shape, rank)));
    owned += region.size();
  }
  TESSERA_CHECK_EQ(owned, copies * element_count(shape));
  for (size_t d = 0; d < shape.size(); ++d) {
    Index covered = 0;
    for (const IntervalSet& part : partition_dim(layout, shape[d], static_cast<int>(d)).parts) covered += part.size();
    TESSERA_CHECK_EQ(covered, shape[d]);
  }
}

}  // namespace

bool layout(Input input) {
  const std::string_view text = as_text(input);
  const size_t line = std::min(text.find('\n'), text.size());
  return accepts([&] {
    const Layout layout = Layout::parse(text.substr(0, line));
    TESSERA_CHECK(Layout::parse(layout.to_string()) == layout);
    if (line == text.size()) return;
    const Shape shape = parse_shape(text.substr(line + 1));
    TESSERA_CHECK(parse_shape(to_string_shape(shape)) == shape);
    const Layout bound = layout.bind(shape);
    TESSERA_CHECK(bound.bind(shape) == bound);
    TESSERA_CHECK(Layout::parse(bound.to_string()) == bound);
    if (is_small(bound, shape)) check_ownership(bound, shape);
  });
}

}  // namespace tessera::fuzz
