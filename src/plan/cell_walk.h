// Turns cells into routes: the only place that decides which rank serves what to whom.
//
// Every cell is served in pieces. A class distributes its cells over its members in canonical order; a destination that
// holds an element serves itself. With several hosts a cell's destinations fall into jobs: those on a host with a
// member of the class are served by that host's members, all others by one multicast from any member, balanced over the
// class's hosts first. If the source is Partial, one owner reduces each element: preferably a destination that needs
// the element and holds a term of it, so that a reduce-scatter on the same ranks has only local routes.
#pragma once

#include <span>
#include <vector>

#include "plan/kind.h"
#include "plan/shares.h"

namespace tessera::plan {

// One box of a cell, served to some of its group.
struct CellPiece {
  const Cell& cell;
  const Box& box;
  Index elements = 0;
  Rank src = 0;
  std::span<const Rank> dsts;  // ascending; only src itself if a rank serves itself
  bool whole_group = false;    // dsts is the cell's whole group
};

class RouteSink {
 public:
  virtual ~RouteSink() = default;
  virtual void route(const CellPiece& piece) = 0;
  // Called before the routes of the same box: `owner` reduces it.
  virtual void reduction(const CellPiece& piece, Rank owner) = 0;
};

class CellWalk {
 public:
  // `rotation` >= 0 shifts which member of a class gets its first share.
  CellWalk(const Kind& kind, const HostMap& hosts, const PlanOptions& options, int rotation, RouteSink& sink);

  void all();
  // Visits every cell that may involve `rank`, in the order of all().
  void of(Rank rank);

 private:
  struct Exclusion {  // cells of the class that are not part of its shares
    Index before = 0;
    Index size = 0;  // of this one and those before it
  };
  struct Job {  // of a class, if there are several hosts
    Index total = 0;
    std::vector<Rank> candidates;
    std::vector<Share> shares;
  };
  struct Assignment {  // of some destinations of a cell to one job
    size_t job = 0;
    Index before = 0;  // elements of the job in earlier cells
  };
  // Destinations of a cell by the host that serves them; kForeign if another host does.
  struct Split {
    int host = 0;
    std::vector<Rank> dsts;
  };

  void enter(int cls);
  void enter_hosts(int cls);
  void exclude_self_served(int cls);
  bool is_excluded(std::span<const LayoutPair::Shared> self) const;
  Index place_in_class(const Cell& cell) const;

  void visit(const Cell& cell);
  void visit_partial(const Cell& cell, std::span<const LayoutPair::Shared> self);
  void visit_hosts(const Cell& cell);
  std::vector<Split> split_by_host(std::span<const Rank> dsts) const;
  std::span<const Rank> others(const Cell& cell, std::span<const LayoutPair::Shared> self);

  void serve(const Cell& cell, std::span<const Share> shares, Index before, std::span<const Rank> dsts);
  void emit(const Cell& cell, const Box& box, Index elements, Rank src, std::span<const Rank> dsts);
  ShareOptions share_options(int rotation) const;

  const Kind& kind_;
  const HostMap& hosts_;
  int rotation_;
  Index min_share_;  // elements
  Index min_piece_;  // elements
  RouteSink& sink_;

  int cls_ = -1;  // the current class; the following belongs to it
  std::vector<Share> shares_;
  std::vector<Exclusion> excluded_;
  std::vector<int> class_hosts_;  // sorted
  std::vector<Job> jobs_;
  std::vector<Assignment> assignments_;
  std::vector<size_t> assignments_begin_;  // by the cell's index in the class

  std::vector<Rank> others_;  // scratch of visit()
  std::vector<Rank> rest_;    // scratch of emit()
  std::vector<Index> places_;
  std::vector<Box> boxes_;
};

}  // namespace tessera::plan
