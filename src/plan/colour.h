// Colours of ranks in pictures.
#pragma once

#include <cstddef>
#include <string>

namespace tessera::plan {

// The colour of rank `index` of `count`, as "#rrggbb": hues from red to violet; if there are many ranks, neighbours
// also differ in lightness.
std::string rank_colour(size_t index, size_t count);

}  // namespace tessera::plan
