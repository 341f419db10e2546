// The planner: which rank sends which elements to whom. Every destination element is written exactly once from a rank
// that holds it, with the fewest bytes and an even load. Pure and deterministic: every rank computes the same plan.
//
// Source and destination ranks share one numbering; a rank may be on both sides. See docs/design/planner.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/layout.h"
#include "tessera/quantize.h"

namespace tessera {

struct TensorMeta {
  Shape shape;
  DType dtype = DType::kF32;
  // Format that its elements are quantised to on their way. Bytes then count codes and scales, without the blocks that
  // an end of a dim or a cut clips. Routes still count elements, and the dtype decides where a tensor may be cut, as it
  // does without a format.
  std::optional<Format> wire = std::nullopt;
  bool operator==(const TensorMeta&) const = default;
};

struct PlanOptions {
  // hosts[h] lists the ranks of host h. Empty: one host. Ranks that no host lists form one more host.
  std::vector<std::vector<Rank>> hosts;
  // A cell is not cut into pieces of fewer bytes than this (0: no limit). The bus uses kBusMinPiece.
  int64_t min_piece_bytes = 0;
  bool operator==(const PlanOptions&) const = default;
};
inline constexpr int64_t kBusMinPiece = 64 << 10;

enum class RouteKind : uint8_t {
  kLocal,      // the destination already holds it: src == dsts[0]
  kP2P,        // one destination
  kMulticast,  // several destinations of one region: once over the network to each host, then fanned out; on one host
               // every destination pulls for itself
};
std::string_view to_string(RouteKind kind);

// One region that one source rank provides.
struct Route {
  Rank src = 0;
  RouteKind kind = RouteKind::kP2P;
  uint32_t group = 0;  // index into Plan::groups: the destinations
  Region region;       // in global coordinates
  int64_t bytes = 0;   // of the region, counted once for any number of destinations
};

// One region of a Partial source. `owner` reduces it once, from the terms of all `peers` (ascending, with the owner
// among them).
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  Rank owner = 0;
  uint32_t group = 0;  // index into Plan::groups: the peers
  Region region;
};

// Byte figures. A multicast counts once at its source. Reduction traffic counts only in `reduction_bytes`.
struct PlanStats {
  int64_t bytes_delivered = 0;    // to all destinations, with local ones
  int64_t bytes_moved = 0;        // to all destinations that are not local
  int64_t bytes_lower_bound = 0;  // that destinations do not hold themselves
  int64_t bytes_between_hosts = 0;
  int64_t max_egress = 0;              // of one source rank
  int64_t max_egress_lower_bound = 0;  // max over holder classes c of ceil(B_c / |c|)
  int64_t reduction_bytes = 0;
  int64_t routes = 0;
  // The quantised part of bytes_moved.
  int64_t quantized_elements_moved = 0;
  int64_t quantized_bytes_moved = 0;
};

// The plan of one tensor, or one rank's part of it. A value; cheap to share.
struct Plan {
  TensorMeta meta;
  Layout src;                             // bound
  Layout dst;                             // bound
  std::vector<std::vector<Rank>> groups;  // destination groups and peer groups, each ascending, each stored once
  std::vector<Route> routes;              // in a canonical order
  std::vector<Reduction> reductions;
  PlanStats stats;

  std::span<const Rank> dsts(const Route& route) const { return groups[route.group]; }
  std::span<const Rank> peers(const Reduction& reduction) const { return groups[reduction.group]; }
  // Bytes each source rank sends (a multicast once), ascending by rank; ranks that send nothing are left out.
  std::vector<std::pair<Rank, int64_t>> egress() const;

  std::string dump() const;     // stable text, one route a line
  std::string to_json() const;  // the schema in docs/formats/plan-json.md
  std::string to_svg() const;   // a picture for people
};

// Plans one tensor. Throws Error(kInvalidArgument) for layouts that do not fit the shape, for a Partial destination
// (the terms of a sum cannot be chosen for another job), for a Partial source whose dtype cannot be reduced, and where
// a cut falls inside a byte.
Plan redistribute(const TensorMeta& meta, const Layout& src, const Layout& dst, const PlanOptions& options = {});

// Plans many tensors between the same ranks: what does not depend on the shape is computed once a pair of layouts, and
// the plan once a kind (shape, dtype, layouts); tensors of one kind share it, rotated so that the load stays even over
// the whole batch. Deterministic in the order of add(). Thread-compatible.
class BatchPlanner {
 public:
  explicit BatchPlanner(PlanOptions options = {});
  ~BatchPlanner();
  BatchPlanner(BatchPlanner&&) noexcept;
  BatchPlanner& operator=(BatchPlanner&&) noexcept;

  // Adds a tensor; returns its ordinal (0, 1, ...). A known kind costs O(source ranks), and no route is built. Throws
  // what redistribute() throws; the batch then stays as it was.
  uint32_t add(const TensorMeta& meta, const Layout& src, const Layout& dst);
  uint32_t size() const;
  uint32_t kinds() const;

  // The plan of tensor `ordinal`, as everyone sees it. Equal to redistribute() except for the rotation.
  Plan plan(uint32_t ordinal) const;
  // Only the routes that `rank` sends or receives and the reductions it owns or feeds; builds nobody else's. stats
  // covers that part. Routes come in the order of plan().
  Plan plan_for(uint32_t ordinal, Rank rank) const;
  // Tensors of one kind and one rotation have one plan, and one number; a batch has few of them.
  uint32_t variant(uint32_t ordinal) const;
  // Figures of the whole batch: sums, and the maximum over ranks of the summed egress. max_egress_lower_bound: over all
  // rank sets that are a holder class of some tensor, what the set and the sets within it have to serve, a rank.
  PlanStats stats() const;
  // Summed egress by source rank, ascending by rank.
  std::vector<std::pair<Rank, int64_t>> egress() const;
  // Bytes of memory that the planner's caches hold, estimated.
  size_t memory_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The text behind `tessera plan`: who sends what in words and a table, totals, lower bound, imbalance.
std::string explain(const Plan& plan);

}  // namespace tessera
