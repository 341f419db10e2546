// What somebody may have meant who wrote a name that nobody knows.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Those of `names` that are most like `name`, the nearest first, three at most: a few letters apart (insertions,
// deletions, replacements, swaps of neighbours), or the same behind a prefix that ends with a dot, as "model." is. Of
// very many names only the first 10,000 are looked at.
std::vector<std::string_view> nearest(std::string_view name, std::span<const std::string_view> names);

// "; did you mean a, b or c?", or nothing.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> names);

}  // namespace tessera
