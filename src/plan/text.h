// Numbers and ranks, formatted for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tessera/layout.h"

namespace tessera::plan {

// "0-3,8"; "0,8,..,56" for evenly spaced ranks; with more than `limit` runs "0,2,4 and 61 more". REQUIRES: ascending.
std::string ranks_text(std::span<const Rank> ranks, size_t limit = 6);
// "768 B", "1.5 MiB".
std::string bytes_text(int64_t bytes);
// "1 rank", "7 ranks".
std::string count_text(int64_t count, const char* noun);
// `part` over `whole` with two decimals; "-" if `whole` is 0.
std::string ratio_text(int64_t part, int64_t whole);

}  // namespace tessera::plan
