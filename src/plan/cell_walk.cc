#include "plan/cell_walk.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/fail.h"

namespace tessera::plan {
namespace {

constexpr int kForeign = std::numeric_limits<int>::max();

Box whole_of(const Cell& cell, int ndim) {
  Box box;
  for (size_t d = 0; d < static_cast<size_t>(ndim); ++d) box.last[d] = cell.dims[d]->size;
  return box;
}

Index size_of(const Box& box, int ndim) {
  Index size = 1;
  for (size_t d = 0; d < static_cast<size_t>(ndim); ++d) size *= box.last[d] - box.first[d];
  return size;
}

}  // namespace

CellWalk::CellWalk(const Kind& kind, const HostMap& hosts, const PlanOptions& options, int rotation, RouteSink& sink)
    : kind_(kind),
      hosts_(hosts),
      rotation_(rotation),
      min_share_(share_minimum(kind, options)),
      min_piece_(std::max<Index>(kind.elements(options.min_piece_bytes), 1)),
      sink_(sink) {}

void CellWalk::all() {
  for (int cls = 0; cls < kind_.pair().sources().classes(); ++cls)
    kind_.for_each_cell_of_class(cls, [&](const Cell& cell) { visit(cell); });
}

void CellWalk::of(Rank rank) {
  const auto source = kind_.pair().sources().place_of(rank);
  const auto destination = kind_.pair().destinations().place_of(rank);
  bool own_class_is_due = source.has_value();
  const auto visit_own_class = [&] {
    if (!std::exchange(own_class_is_due, false)) return;
    kind_.for_each_cell_of_class(source->cls, [&](const Cell& cell) { visit(cell); });
  };
  if (destination) {
    kind_.for_each_cell_of_group(destination->cls, [&](const Cell& cell) {
      if (source && cell.cls >= source->cls) visit_own_class();
      if (!source || cell.cls != source->cls) visit(cell);
    });
  }
  visit_own_class();
}

ShareOptions CellWalk::share_options(int rotation) const {
  return {.hosts = &hosts_, .rotation = rotation, .min_share = min_share_};
}

// --- one class -----------------------------------------------------------------------------------

void CellWalk::enter(int cls) {
  cls_ = cls;
  if (!hosts_.single() && !kind_.pair().partial()) return enter_hosts(cls);
  exclude_self_served(cls);
  const Index total = kind_.class_size(cls) - (excluded_.empty() ? 0 : excluded_.back().size);
  shares_.clear();
  if (total > 0) shares_ = share_out(total, kind_.pair().sources().ranks(cls), share_options(rotation_));
}

// Cells without shares: all destinations hold them or, with a Partial source, some destination owns them.
bool CellWalk::is_excluded(std::span<const LayoutPair::Shared> self) const {
  const auto count = static_cast<int>(self.size());
  return kind_.pair().partial() ? count > 0 : count == kind_.pair().destinations().members();
}

void CellWalk::exclude_self_served(int cls) {
  excluded_.clear();
  const auto shared = kind_.pair().shared(cls);
  for (size_t first = 0; first < shared.size();) {
    const auto self = kind_.pair().shared(cls, shared[first].group);
    Cell cell;
    if (is_excluded(self) && kind_.find_cell(cls, shared[first].group, cell))
      excluded_.push_back({cell.before, cell.size});
    first += self.size();
  }
  std::ranges::sort(excluded_, {}, &Exclusion::before);
  Index sum = 0;
  for (Exclusion& exclusion : excluded_) exclusion.size = sum += exclusion.size;
}

Index CellWalk::place_in_class(const Cell& cell) const {
  const auto behind = std::ranges::lower_bound(excluded_, cell.before, {}, &Exclusion::before);
  return cell.before - (behind == excluded_.begin() ? 0 : std::prev(behind)->size);
}

// The totals of every job of the class, and the position of each cell in its jobs.
void CellWalk::enter_hosts(int cls) {
  const auto members = kind_.pair().sources().ranks(cls);
  class_hosts_.clear();
  for (const Rank rank : members) class_hosts_.push_back(hosts_.of(rank));
  std::ranges::sort(class_hosts_);
  class_hosts_.erase(std::ranges::unique(class_hosts_).begin(), class_hosts_.end());

  jobs_.assign(class_hosts_.size() + 1, {});  // one for each host, then one for hosts without a member
  for (const Rank rank : members) {
    const auto at = std::ranges::lower_bound(class_hosts_, hosts_.of(rank));
    jobs_[static_cast<size_t>(at - class_hosts_.begin())].candidates.push_back(rank);
    jobs_.back().candidates.push_back(rank);
  }
  assignments_.clear();
  assignments_begin_.assign(1, 0);
  kind_.for_each_cell_of_class(cls, [&](const Cell& cell) {
    for (const Split& split : split_by_host(others(cell, kind_.pair().shared(cls, cell.group)))) {
      const auto at = std::ranges::lower_bound(class_hosts_, split.host);  // kForeign: the last job
      const auto job = static_cast<size_t>(at - class_hosts_.begin());
      assignments_.push_back({job, jobs_[job].total});
      jobs_[job].total += cell.size;
    }
    assignments_begin_.push_back(assignments_.size());
  });
  for (Job& job : jobs_)
    if (job.total > 0) job.shares = share_out(job.total, job.candidates, share_options(rotation_));
}

// --- one cell ------------------------------------------------------------------------------------

void CellWalk::visit(const Cell& cell) {
  if (cell.cls != cls_) enter(cell.cls);
  const auto self = kind_.pair().shared(cell.cls, cell.group);
  if (kind_.pair().partial()) return visit_partial(cell, self);
  for (const auto& shared : self) emit(cell, whole_of(cell, kind_.ndim()), cell.size, shared.rank, {&shared.rank, 1});
  if (!hosts_.single()) return visit_hosts(cell);
  const auto dsts = others(cell, self);
  if (!dsts.empty()) serve(cell, shares_, place_in_class(cell), dsts);
}

// The group without the ranks that serve themselves.
std::span<const Rank> CellWalk::others(const Cell& cell, std::span<const LayoutPair::Shared> self) {
  const auto group = kind_.pair().group(cell.group);
  if (self.empty()) return group;
  others_.clear();
  auto next = self.begin();  // both ascend by rank
  for (const Rank rank : group) {
    if (next != self.end() && next->rank == rank)
      ++next;
    else
      others_.push_back(rank);
  }
  return others_;
}

void CellWalk::visit_partial(const Cell& cell, std::span<const LayoutPair::Shared> self) {
  const auto group = kind_.pair().group(cell.group);
  if (self.empty() && hosts_.single()) return serve(cell, shares_, place_in_class(cell), group);
  std::vector<Rank> owners;
  for (const auto& shared : self) owners.push_back(shared.rank);
  if (self.empty()) {  // members on the destinations' hosts, if there are any
    const auto members = kind_.pair().sources().ranks(cell.cls);
    std::vector<int> hosts;
    for (const Rank rank : group) hosts.push_back(hosts_.of(rank));
    std::ranges::copy_if(members, std::back_inserter(owners),
                         [&](Rank rank) { return std::ranges::find(hosts, hosts_.of(rank)) != hosts.end(); });
    if (owners.empty()) owners.assign(members.begin(), members.end());
  }
  serve(cell, share_out(cell.size, owners, share_options(rotation_ + cell.group)), 0, group);
}

std::vector<CellWalk::Split> CellWalk::split_by_host(std::span<const Rank> dsts) const {
  std::vector<Split> splits;
  for (const Rank rank : dsts) {
    const int host = hosts_.of(rank);
    const int server = std::ranges::binary_search(class_hosts_, host) ? host : kForeign;
    auto at = std::ranges::find(splits, server, &Split::host);
    if (at == splits.end()) at = splits.insert(at, {server, {}});
    at->dsts.push_back(rank);
  }
  std::ranges::sort(splits, {}, &Split::host);
  return splits;
}

void CellWalk::visit_hosts(const Cell& cell) {
  size_t ordinal = 0;
  for (int d = 0; d < kind_.ndim(); ++d) {
    const Overlap& overlap = *cell.dims[static_cast<size_t>(d)];
    ordinal = ordinal * kind_.dim(d).of_source(overlap.src).size() + static_cast<size_t>(kind_.dim(d).ordinal(overlap));
  }
  const Assignment* assignment = assignments_.data() + assignments_begin_[ordinal];
  for (const Split& split : split_by_host(others(cell, kind_.pair().shared(cell.cls, cell.group)))) {
    serve(cell, jobs_[assignment->job].shares, assignment->before, split.dsts);
    ++assignment;
  }
}

// The cell is elements [before, before + cell.size) of `shares`.
void CellWalk::serve(const Cell& cell, std::span<const Share> shares, Index before, std::span<const Rank> dsts) {
  auto share = std::ranges::upper_bound(shares, before, {}, &Share::end);
  TESSERA_CHECK(share != shares.end());
  if (share->end >= before + cell.size) return emit(cell, whole_of(cell, kind_.ndim()), cell.size, share->src, dsts);

  const Index begin = share == shares.begin() ? 0 : std::prev(share)->end;
  std::array<Index, kMaxDims> extents{};
  for (size_t d = 0; d < static_cast<size_t>(kind_.ndim()); ++d) extents[d] = cell.dims[d]->size;
  places_.clear();
  for (auto next = share; next->end < before + cell.size; ++next) places_.push_back(next->end - before);
  const Cutter cutter({extents.data(), static_cast<size_t>(kind_.ndim())}, places_,
                      {kind_.granules(), share->end - begin, min_piece_});
  for (size_t k = 0; k <= places_.size(); ++k, ++share) {
    boxes_.clear();
    cutter.append_piece(k, boxes_);
    for (const Box& box : boxes_) emit(cell, box, size_of(box, kind_.ndim()), share->src, dsts);
  }
}

void CellWalk::emit(const Cell& cell, const Box& box, Index elements, Rank src, std::span<const Rank> dsts) {
  const bool whole_group = dsts.size() == static_cast<size_t>(kind_.pair().destinations().members());
  CellPiece piece{cell, box, elements, src, dsts, whole_group};
  if (!kind_.pair().partial()) return sink_.route(piece);
  sink_.reduction(piece, src);
  if (std::ranges::binary_search(dsts, src)) {
    rest_.assign(dsts.begin(), dsts.end());
    std::erase(rest_, src);
    piece.dsts = {&src, 1};
    piece.whole_group = dsts.size() == 1;
    sink_.route(piece);
    piece.dsts = rest_;
    piece.whole_group = false;
  }
  if (!piece.dsts.empty()) sink_.route(piece);
}

}  // namespace tessera::plan
