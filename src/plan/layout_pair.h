// The pair level of the planner: which ranks may serve which between two layouts, for tensors of any shape.
#pragma once

#include <span>
#include <unordered_map>
#include <vector>

#include "plan/holders.h"
#include "tessera/plan.h"

namespace tessera::plan {

// The host of every rank. All ranks that are not listed share one more host.
class HostMap {
 public:
  // Throws if a rank is listed twice.
  explicit HostMap(const PlanOptions& options);
  int of(Rank rank) const;
  bool single() const { return host_of_.empty(); }
  // Hosts among `dsts` other than that of `src`: the number of times that a multicast crosses between hosts.
  int crossings(Rank src, std::span<const Rank> dsts) const;

 private:
  std::unordered_map<Rank, int> host_of_;
  int rest_ = 0;
};

class LayoutPair {
 public:
  // REQUIRES: both are bound to shapes of `ndim` dims.
  LayoutPair(Layout src, Layout dst, int ndim);

  const Layout& src() const { return src_; }
  const Layout& dst() const { return dst_; }
  const Holders& sources() const { return sources_; }
  const Holders& destinations() const { return destinations_; }
  bool partial() const { return partial_; }

  // The destinations that own the same elements, ascending by rank.
  std::span<const Rank> group(int group) const {
    const auto n = static_cast<size_t>(destinations_.members());
    return std::span(group_ranks_).subspan(static_cast<size_t>(group) * n, n);
  }

  // A rank that is a source in class `cls` and a destination in group `group`.
  struct Shared {
    int cls = 0;
    int group = 0;
    Rank rank = 0;
    auto operator<=>(const Shared&) const = default;
  };
  // The shared ranks of one class, sorted.
  std::span<const Shared> shared(int cls) const;
  // The shared ranks of one class and one group, ascending by rank.
  std::span<const Shared> shared(int cls, int group) const;

  size_t memory_bytes() const;

 private:
  Layout src_;
  Layout dst_;
  Holders sources_;
  Holders destinations_;
  bool partial_;
  std::vector<Rank> group_ranks_;
  std::vector<Shared> shared_;
};

}  // namespace tessera::plan
