#include "plan/shares.h"

#include <algorithm>

namespace tessera::plan {
namespace {

// Appends shares of [begin, begin + total) for `count` of the candidates, starting with the one at `rotation`.
void append_equal(Index begin, Index total, Index count, std::span<const Rank> candidates, int rotation,
                  std::vector<Share>& shares) {
  for (Index k = 0; k < count; ++k) {
    const Index end = begin + part_begin(total, count, k + 1);
    if (end == begin + part_begin(total, count, k)) break;  // the rest is empty as well
    const size_t at = static_cast<size_t>(k + rotation) % candidates.size();
    shares.push_back({end, candidates[at]});
  }
}

std::vector<std::vector<Rank>> by_host(std::span<const Rank> candidates, const HostMap& hosts) {
  std::vector<std::vector<Rank>> lists;
  std::unordered_map<int, size_t> index;
  for (const Rank rank : candidates) {
    const auto [at, is_new] = index.emplace(hosts.of(rank), lists.size());
    if (is_new) lists.emplace_back();
    lists[at->second].push_back(rank);
  }
  return lists;
}

}  // namespace

Index share_count(Index total, Index candidates, Index min_share) {
  return std::clamp<Index>(total / std::max<Index>(min_share, 1), 1, candidates);
}

// A cut may be slightly off on both sides of a share (cutter.h).
Index share_minimum(const Kind& kind, const PlanOptions& options) {
  const Index piece = kind.elements(options.min_piece_bytes);
  return piece + piece / 16;
}

std::vector<Share> share_out(Index total, std::span<const Rank> candidates, const ShareOptions& options) {
  std::vector<Share> shares;
  const Index count = share_count(total, static_cast<Index>(candidates.size()), options.min_share);
  if (options.hosts->single() || candidates.size() == 1) {
    append_equal(0, total, count, candidates, options.rotation, shares);
    return shares;
  }
  const auto lists = by_host(candidates, *options.hosts);
  const auto hosts = static_cast<Index>(lists.size());
  const Index used = std::min(hosts, count);
  for (Index k = 0; k < used; ++k) {
    const auto& ranks = lists[static_cast<size_t>(k + options.rotation) % lists.size()];
    const Index begin = part_begin(total, used, k);
    const Index size = part_begin(total, used, k + 1) - begin;
    if (size == 0) break;
    append_equal(begin, size, share_count(size, static_cast<Index>(ranks.size()), options.min_share), ranks,
                 options.rotation / static_cast<int>(hosts), shares);
  }
  return shares;
}

}  // namespace tessera::plan
