#include "plan/builder.h"

#include <algorithm>

namespace tessera::plan {
namespace {

// Lists of ranks, each stored once and numbered.
class GroupTable {
 public:
  explicit GroupTable(std::vector<std::vector<Rank>>& groups) : groups_(groups) {}

  uint32_t intern(std::span<const Rank> ranks) {
    const auto [first, last] = by_hash_.equal_range(hash(ranks));
    for (auto at = first; at != last; ++at)
      if (std::ranges::equal(groups_[at->second], ranks)) return at->second;
    const auto id = static_cast<uint32_t>(groups_.size());
    groups_.emplace_back(ranks.begin(), ranks.end());
    by_hash_.emplace(hash(ranks), id);
    return id;
  }

 private:
  static uint64_t hash(std::span<const Rank> ranks) {  // FNV-1a over ranks
    uint64_t h = 0xcbf29ce484222325;
    for (const Rank rank : ranks) h = (h ^ static_cast<uint64_t>(rank)) * 0x100000001b3;
    return h;
  }

  std::vector<std::vector<Rank>>& groups_;
  std::unordered_multimap<uint64_t, uint32_t> by_hash_;
};

Region region_of(const Cell& cell, const Box& box, int ndim) {
  std::vector<IntervalSet> dims;
  dims.reserve(static_cast<size_t>(ndim));
  for (size_t d = 0; d < static_cast<size_t>(ndim); ++d) {
    const bool whole = box.first[d] == 0 && box.last[d] == cell.dims[d]->size;
    dims.push_back(whole ? cell.dims[d]->set : cell.dims[d]->set.slice(box.first[d], box.last[d]));
  }
  return Region(std::move(dims));
}

RouteKind kind_of(const CellPiece& piece) {
  if (piece.dsts.size() > 1) return RouteKind::kMulticast;
  return piece.dsts[0] == piece.src ? RouteKind::kLocal : RouteKind::kP2P;
}

class PlanBuilder final : public RouteSink {
 public:
  PlanBuilder(const Kind& kind, const HostMap& hosts, std::optional<Rank> only)
      : kind_(kind), hosts_(hosts), only_(only), table_(plan_.groups) {
    plan_.meta = kind.meta();
    plan_.src = kind.pair().src();
    plan_.dst = kind.pair().dst();
    if (!only) return;
    if (const auto place = kind.pair().destinations().place_of(*only)) own_group_ = place->cls;
  }

  void route(const CellPiece& piece) override {
    if (only_ && piece.src != *only_ && !reaches(piece, *only_)) return;
    const int64_t bytes = kind_.bytes(piece.elements);
    const RouteKind kind = kind_of(piece);
    plan_.routes.push_back({piece.src, kind, group_of(piece), region_of(piece.cell, piece.box, kind_.ndim()), bytes});
    const auto delivered = bytes * static_cast<int64_t>(piece.dsts.size());
    plan_.stats.bytes_delivered += delivered;
    plan_.stats.bytes_between_hosts += bytes * hosts_.crossings(piece.src, piece.dsts);
    if (kind == RouteKind::kLocal) return;
    plan_.stats.bytes_moved += delivered;
    if (!kind_.meta().wire) return;
    plan_.stats.quantized_bytes_moved += delivered;
    plan_.stats.quantized_elements_moved += piece.elements * static_cast<int64_t>(piece.dsts.size());
  }

  void reduction(const CellPiece& piece, Rank owner) override {
    const Holders& sources = kind_.pair().sources();
    const auto peers = static_cast<size_t>(sources.peers());
    const size_t replica = static_cast<size_t>(sources.place_of(owner)->member) / peers;
    const auto terms = sources.ranks(piece.cell.cls).subspan(replica * peers, peers);
    if (only_ && std::ranges::find(terms, *only_) == terms.end()) return;
    peers_.assign(terms.begin(), terms.end());
    std::ranges::sort(peers_);
    plan_.reductions.push_back({*kind_.pair().src().partial_op(), owner, table_.intern(peers_),
                                region_of(piece.cell, piece.box, kind_.ndim())});
    plan_.stats.reduction_bytes += kind_.source_bytes(piece.elements) * (sources.peers() - 1);
  }

  Plan take() {
    plan_.stats.bytes_lower_bound = kind_.lower_bound();
    plan_.stats.max_egress_lower_bound = kind_.egress_bound();
    plan_.stats.routes = static_cast<int64_t>(plan_.routes.size());
    for (const auto& [rank, bytes] : plan_.egress()) plan_.stats.max_egress = std::max(plan_.stats.max_egress, bytes);
    return std::move(plan_);
  }

 private:
  bool reaches(const CellPiece& piece, Rank rank) const {
    if (piece.cell.group != own_group_) return false;
    return piece.whole_group || std::ranges::binary_search(piece.dsts, rank);
  }

  uint32_t group_of(const CellPiece& piece) {
    if (!piece.whole_group) return table_.intern(piece.dsts);
    const auto known = whole_groups_.find(piece.cell.group);
    if (known != whole_groups_.end()) return known->second;
    return whole_groups_[piece.cell.group] = table_.intern(piece.dsts);
  }

  const Kind& kind_;
  const HostMap& hosts_;
  std::optional<Rank> only_;
  int own_group_ = -1;  // of only_
  Plan plan_;
  GroupTable table_;
  std::unordered_map<int, uint32_t> whole_groups_;
  std::vector<Rank> peers_;
};

}  // namespace

Plan build_plan(const Kind& kind, const HostMap& hosts, const PlanOptions& options, int rotation,
                std::optional<Rank> rank) {
  PlanBuilder builder(kind, hosts, rank);
  CellWalk walk(kind, hosts, options, rotation, builder);
  if (rank)
    walk.of(*rank);
  else
    walk.all();
  return builder.take();
}

}  // namespace tessera::plan
