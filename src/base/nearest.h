// Suggestions for a name that does not exist.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Up to three of `names` that are most like `name`, the nearest first: names a few letters away (insertions, deletions,
// replacements, swaps of neighbours), and names that differ only in a prefix that ends with a dot, such as "model.".
// Looks at the first 10,000 names only.
std::vector<std::string_view> nearest(std::string_view name, std::span<const std::string_view> names);

// "; did you mean a, b or c?", or nothing.
std::string did_you_mean(std::string_view name, std::span<const std::string_view> names);

}  // namespace tessera
