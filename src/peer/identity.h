// Which process this is on the bus, and how ranks are named in messages and keys. Values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"
#include "tessera/layout.h"

namespace tessera {

inline constexpr int kMaxWorld = 1 << 20;

struct Identity {
  std::string name_space;
  std::string job;
  Rank rank = 0;
  int world = 1;
  std::string name() const;  // "trainer/3"
};

// The names that every line logged about a batch carries. They must outlive it.
LogScope log_scope(const Identity& identity, std::string_view pair, std::string_view batch);

// Names become parts of keys. Throws kInvalidArgument unless `name` is 1 to 64 letters, digits, '.', '_' and '-'. The
// message calls it a `what`.
void check_name(std::string_view what, std::string_view name);

// "trainer/3", as messages name a rank.
std::string rank_name(std::string_view job, Rank rank);
// For messages about missing ranks, such as "trainer/0-2, trainer/5"; at most eight ranges.
std::string rank_list(std::string_view job, const std::vector<Rank>& ranks);

struct JobRank {
  std::string job;
  Rank rank = 0;
};
// Parses "JOB/RANK" at the end of a store key that begins with `prefix`. Throws kInvalidArgument for a key that no
// rank writes.
JobRank parse_pair_key(std::string_view prefix, std::string_view key);

}  // namespace tessera
