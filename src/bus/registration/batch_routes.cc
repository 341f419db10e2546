#include "bus/registration/batch_routes.h"

#include <algorithm>
#include <unordered_map>

#include "base/fail.h"

namespace tessera::bus {
namespace {

// The reduction of `owner` that makes `region`: the planner gives every route of a Partial tensor a separate one.
template <typename Reductions, typename RegionOf>
size_t reduction_of(const Reductions& reductions, const Region& region, const RegionOf& region_of) {
  const auto it =
      std::ranges::find_if(reductions, [&](const auto& reduction) { return region_of(reduction) == region; });
  TESSERA_CHECK(it != reductions.end());
  return static_cast<size_t>(it - reductions.begin());
}

// One rank's part of the plan of a tensor; the same for all tensors with the same plan.
struct RankPlan {
  Plan plan;
  std::vector<Region> sources;  // by route, LinkRoute::src_owned
  Region owned;                 // on a sender: what it holds
};

class SenderRoutes {
 public:
  SenderRoutes(BatchRoutes& routes, const Match& match, Rank sender_world, Rank own)
      : routes_(routes), match_(match), sender_world_(sender_world), own_(own) {}

  void add(uint32_t tensor, const RankPlan& part) {
    const Plan& plan = part.plan;
    const size_t first_reduction = routes_.reductions.size();
    for (const Reduction& reduction : plan.reductions) {
      const auto peers = plan.peers(reduction);
      if (reduction.owner == own_)
        routes_.reductions.push_back({tensor, reduction.op, reduction.region, {peers.begin(), peers.end()}});
      if (std::ranges::binary_search(peers, own_))
        routes_.reduced_by[static_cast<size_t>(reduction.owner)].push_back(
            {.tensor = tensor, .route = 0, .region = reduction.region, .src_owned = part.owned});
    }
    for (size_t i = 0; i < plan.routes.size(); ++i) {
      const Route& route = plan.routes[i];
      if (route.src != own_) continue;
      SentRoute sent{.tensor = tensor, .reduction = SentRoute::kNone, .region = route.region};
      if (match_.tensors[tensor].src.has_partial())
        sent.reduction = static_cast<uint32_t>(
            first_reduction + reduction_of(std::span(routes_.reductions).subspan(first_reduction), route.region,
                                           [](const OwnedReduction& made) -> const Region& { return made.region; }));
      const LinkRoute link{.tensor = tensor,
                           .route = static_cast<uint32_t>(routes_.sent.size()),
                           .region = route.region,
                           .src_owned = part.sources[i]};
      for (const Rank dst : plan.dsts(route)) routes_.by_peer[static_cast<size_t>(dst - sender_world_)].push_back(link);
      routes_.sent.push_back(std::move(sent));
    }
  }

 private:
  BatchRoutes& routes_;
  const Match& match_;
  const Rank sender_world_;
  const Rank own_;
};

void add_received(BatchRoutes& routes, uint32_t ordinal, Rank dst, const RankPlan& part) {
  for (size_t i = 0; i < part.plan.routes.size(); ++i) {
    const Route& route = part.plan.routes[i];
    if (!std::ranges::binary_search(part.plan.dsts(route), dst)) continue;
    routes.by_peer[static_cast<size_t>(route.src)].push_back(
        {.tensor = ordinal, .route = 0, .region = route.region, .src_owned = part.sources[i]});
  }
}

// The plans of a batch as one rank sees them; each variant is planned once.
class RankPlans {
 public:
  RankPlans(const BatchPlanner& planner, const Match& match, Rank rank, bool sends)
      : planner_(planner), match_(match), rank_(rank), sends_(sends) {}

  const RankPlan& of(uint32_t ordinal) {
    const auto [known, is_new] = by_variant_.try_emplace(planner_.variant(ordinal));
    if (is_new) known->second = make(ordinal);
    return known->second;
  }

 private:
  RankPlan make(uint32_t ordinal) const {
    const Match::Tensor& tensor = match_.tensors[ordinal];
    RankPlan part{.plan = planner_.plan_for(ordinal, rank_), .sources = {}, .owned = {}};
    for (const Route& route : part.plan.routes)
      part.sources.push_back(tensor.src.has_partial() ? route.region : tensor.src.owned(tensor.shape, route.src));
    if (sends_) part.owned = tensor.src.owned(tensor.shape, rank_);
    return part;
  }

  const BatchPlanner& planner_;
  const Match& match_;
  const Rank rank_;  // in the plan's numbering
  const bool sends_;
  std::unordered_map<uint32_t, RankPlan> by_variant_;
};

}  // namespace

BatchRoutes plan_batch(const Match& match, int sender_world, int receiver_world, bool sends, Rank own) {
  BatchRoutes routes;
  routes.by_peer.resize(static_cast<size_t>(sends ? receiver_world : sender_world));
  routes.reduced_by.resize(static_cast<size_t>(sends ? sender_world : 0));
  BatchPlanner planner({.hosts = {}, .min_piece_bytes = kBusMinPiece});
  std::unordered_map<Layout, Layout, LayoutHash> shifted;  // destinations: their ranks follow the sources'
  for (const Match::Tensor& tensor : match.tensors) {
    try {
      const auto [dst, is_new] = shifted.try_emplace(tensor.dst);
      if (is_new) dst->second = tensor.dst.shifted(sender_world);
      planner.add({tensor.shape, tensor.src_dtype, tensor.wire}, tensor.src, dst->second);
    } catch (const Error& error) {
      fail(error.code(), "tensor {}: {}"_message, tensor.name, error.what());
    }
  }
  const Rank rank = sends ? own : own + sender_world;
  RankPlans plans(planner, match, rank, sends);
  SenderRoutes sender(routes, match, sender_world, own);
  for (uint32_t ordinal = 0; ordinal < planner.size(); ++ordinal) {
    if (sends)
      sender.add(ordinal, plans.of(ordinal));
    else
      add_received(routes, ordinal, rank, plans.of(ordinal));
  }
  routes.stats = planner.stats();
  routes.kinds = planner.kinds();
  return routes;
}

void RankShare::add(const WirePiece& piece) {
  const Index elements = piece.walk().elements();
  quantized_elements += elements;
  quantized_bytes += piece.bytes();
  quantized_source_bytes += bytes_of(piece.what().src_dtype, elements);
}

RankShare& RankShare::operator+=(const RankShare& other) {
  bytes += other.bytes;
  quantized_elements += other.quantized_elements;
  quantized_bytes += other.quantized_bytes;
  quantized_source_bytes += other.quantized_source_bytes;
  return *this;
}

WireRegion wire_region(const Match::Tensor& tensor, const Region& region) {
  const FusedPart::Place place = tensor.fused.value_or(FusedPart::Place{});
  return {.format = codec::BlockFormat(tensor.wire.value()),
          .src_dtype = tensor.src_dtype,
          .shape = tensor.shape,
          .region = region,
          .fused = tensor.fused.has_value(),
          .row0 = place.row,
          .column0 = place.column};
}

RouteRegion piece_region(uint32_t tensor, const WirePiece& piece) {
  const Shape shape{piece.bytes()};
  return {.tensor = tensor, .shape = shape, .dtype = DType::kU8, .region = Region::full(shape)};
}

}  // namespace tessera::bus
