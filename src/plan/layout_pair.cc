#include "plan/layout_pair.h"

#include <algorithm>
#include <utility>

#include "base/fail.h"

namespace tessera::plan {

HostMap::HostMap(const PlanOptions& options) : rest_(static_cast<int>(options.hosts.size())) {
  for (size_t host = 0; host < options.hosts.size(); ++host) {
    for (const Rank rank : options.hosts[host]) {
      if (rank < 0)
        fail(ErrorCode::kInvalidArgument, "host {} lists rank {}: ranks are not negative"_message, host, rank);
      const auto [at, is_new] = host_of_.emplace(rank, static_cast<int>(host));
      if (!is_new)
        fail(ErrorCode::kInvalidArgument, "rank {} is listed on host {} and on host {}: name it once"_message, rank,
             at->second, host);
    }
  }
}

int HostMap::of(Rank rank) const {
  const auto at = host_of_.find(rank);
  return at == host_of_.end() ? rest_ : at->second;
}

int HostMap::crossings(Rank src, std::span<const Rank> dsts) const {
  if (single()) return 0;
  std::vector<int> hosts;
  for (const Rank dst : dsts) hosts.push_back(of(dst));
  std::ranges::sort(hosts);
  const auto distinct = std::ranges::unique(hosts).begin() - hosts.begin();
  return static_cast<int>(distinct) - (std::binary_search(hosts.begin(), hosts.begin() + distinct, of(src)) ? 1 : 0);
}

LayoutPair::LayoutPair(Layout src, Layout dst, int ndim)
    : src_(std::move(src)),
      dst_(std::move(dst)),
      sources_(src_, ndim),
      destinations_(dst_, ndim),
      partial_(src_.has_partial()) {
  for (int group = 0; group < destinations_.classes(); ++group) {
    const auto ranks = destinations_.ranks(group);
    group_ranks_.insert(group_ranks_.end(), ranks.begin(), ranks.end());
    std::sort(group_ranks_.end() - destinations_.members(), group_ranks_.end());
    for (const Rank rank : ranks) {
      if (const auto place = sources_.place_of(rank)) shared_.push_back({place->cls, group, rank});
    }
  }
  std::ranges::sort(shared_);
}

std::span<const LayoutPair::Shared> LayoutPair::shared(int cls) const {
  const auto found = std::ranges::equal_range(shared_, cls, {}, &Shared::cls);
  return {found.begin(), found.end()};
}

std::span<const LayoutPair::Shared> LayoutPair::shared(int cls, int group) const {
  if (shared_.empty()) return {};
  const auto key = [](const Shared& s) { return std::pair(s.cls, s.group); };
  const auto found = std::ranges::equal_range(shared_, std::pair(cls, group), {}, key);
  return {found.begin(), found.end()};
}

size_t LayoutPair::memory_bytes() const {
  const auto of = [](const Layout& layout, const Holders& holders) {
    return layout.mesh().ranks().size() * sizeof(Rank) * 2 + holders.memory_bytes();
  };
  return sizeof(*this) + of(src_, sources_) + of(dst_, destinations_) + group_ranks_.capacity() * sizeof(Rank) +
         shared_.capacity() * sizeof(Shared);
}

}  // namespace tessera::plan
