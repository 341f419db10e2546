#include "peer/identity.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "base/fail.h"

namespace tessera {

std::string Identity::name() const {
  return rank_name(job, rank);
}

LogScope log_scope(const Identity& identity, std::string_view pair, std::string_view batch) {
  return LogScope({{"job", identity.job}, {"rank", identity.rank}, {"pair", pair}, {"batch", batch}});
}

void check_name(std::string_view what, std::string_view name) {
  const bool good = std::ranges::all_of(
      name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-'; });
  if (name.empty() || name.size() > 64 || !good)
    fail(ErrorCode::kInvalidArgument, "{} \"{}\": 1 to 64 letters, digits, '.', '_' or '-' are wanted"_message, what,
         name.substr(0, 80));
}

std::string rank_name(std::string_view job, Rank rank) {
  return fmt::format("{}/{}", job, rank);
}

JobRank parse_pair_key(std::string_view prefix, std::string_view key) {
  JobRank parsed;
  const std::string_view rest = key.substr(std::min(prefix.size(), key.size()));
  const size_t slash = rest.find('/');
  if (slash != std::string_view::npos) {
    const std::string_view digits = rest.substr(slash + 1);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), parsed.rank);
    if (error == std::errc{} && end == digits.data() + digits.size() && parsed.rank >= 0) {
      parsed.job = rest.substr(0, slash);
      return parsed;
    }
  }
  fail(ErrorCode::kInvalidArgument, "store key {}: not JOB/RANK below {}"_message, key, prefix);
}

std::string rank_list(std::string_view job, const std::vector<Rank>& ranks) {
  std::string text;
  int ranges = 0;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (++ranges > 8) return text + ", ...";
    if (!text.empty()) text += ", ";
    text += last == i ? rank_name(job, ranks[i]) : fmt::format("{}/{}-{}", job, ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace tessera
