// One rank's part of a batch's plan, sorted by peer rank. Both ends of a connection compute the same routes in the same
// order, so that messages refer to them by position.
#pragma once

#include <cstdint>
#include <vector>

#include "bus/registration/match.h"
#include "exec/wire/wire_piece.h"
#include "tessera/plan.h"

namespace tessera::bus {

// A region of one tensor that moves over one connection.
struct LinkRoute {
  uint32_t tensor = 0;  // position in the match
  uint32_t route = 0;   // on a sender: index into BatchRoutes::sent
  Region region;
  // The memory at the source: its owned set or, for a Partial tensor, the region that was reduced.
  Region src_owned;
};

// A region that this sender serves to any number of ranks.
struct SentRoute {
  uint32_t tensor = 0;
  uint32_t reduction = kNone;  // index into BatchRoutes::reductions if the tensor is Partial
  Region region;
  static constexpr uint32_t kNone = UINT32_MAX;
};

// A region that this rank reduces before it serves it.
struct OwnedReduction {
  uint32_t tensor = 0;
  ReduceOp op = ReduceOp::kSum;
  Region region;
  std::vector<Rank> peers;  // ascending, including this rank
};

struct BatchRoutes {
  // [rank of the other job]: the routes between it and this rank.
  std::vector<std::vector<LinkRoute>> by_peer;
  std::vector<SentRoute> sent;
  std::vector<OwnedReduction> reductions;
  // [rank of this job]: the reductions of that rank that this rank contributes to, in that rank's order; this rank
  // included.
  std::vector<std::vector<LinkRoute>> reduced_by;
  PlanStats stats;     // of the whole batch, over all ranks
  uint32_t kinds = 0;  // distinct plans

  // Whether this rank has a connection with `peer` of the other job, where `receiver` is the receiving one of the two:
  // if there are routes between them. Rank 0 of the receivers, which chooses versions, is connected with every sender.
  bool connects(Rank receiver, Rank peer) const { return receiver == 0 || !by_peer[static_cast<size_t>(peer)].empty(); }
};

// The routes that travel as deltas in one transfer.
struct DeltaBytes {
  int64_t routes = 0;
  int64_t read = 0;  // bytes of the deltas
  int64_t full = 0;  // of the routes

  DeltaBytes& operator+=(const DeltaBytes& other) {
    routes += other.routes;
    read += other.read;
    full += other.full;
    return *this;
  }
};

// What one transfer moves from this rank or to it; BatchStats says more about what is quantised.
struct RankShare {
  int64_t bytes = 0;
  int64_t quantized_elements = 0;
  int64_t quantized_bytes = 0;
  int64_t quantized_source_bytes = 0;

  void add(const WirePiece& piece);  // adds to what is quantised
  RankShare& operator+=(const RankShare& other);
};

// In the plan, source ranks are 0 .. sender_world-1 and destination ranks follow from sender_world; `own` is a rank of
// its own job.
BatchRoutes plan_batch(const Match& match, int sender_world, int receiver_world, bool sends, Rank own);

// A sent region of a tensor that is quantised on its way and, for links and messages, the piece that it travels as.
// REQUIRES: tensor.wire
WireRegion wire_region(const Match::Tensor& tensor, const Region& region);
RouteRegion piece_region(uint32_t tensor, const WirePiece& piece);

}  // namespace tessera::bus
