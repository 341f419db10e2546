#include "bus/registration/batch_routes.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera::bus {
namespace {

// The reduction of `owner` that makes `region`: the planner gives every route of a Partial tensor one of its own.
template <typename Reductions, typename RegionOf>
size_t reduction_of(const Reductions& reductions, const Region& region, const RegionOf& region_of) {
  const auto it =
      std::ranges::find_if(reductions, [&](const auto& reduction) { return region_of(reduction) == region; });
  TESSERA_CHECK(it != reductions.end());
  return static_cast<size_t>(it - reductions.begin());
}

class SenderRoutes {
 public:
  SenderRoutes(BatchRoutes& routes, const Match& match, Rank sender_world, Rank own)
      : routes_(routes), match_(match), sender_world_(sender_world), own_(own) {}

  void add(uint32_t tensor, const Plan& plan) {
    const size_t first_reduction = routes_.reductions.size();
    for (const Reduction& reduction : plan.reductions) {
      const auto peers = plan.peers(reduction);
      if (reduction.owner == own_)
        routes_.reductions.push_back({tensor, reduction.op, reduction.region, {peers.begin(), peers.end()}});
      if (std::ranges::binary_search(peers, own_))
        routes_.reduced_by[static_cast<size_t>(reduction.owner)].push_back(
            {.tensor = tensor, .route = 0, .region = reduction.region, .src_owned = owned(tensor)});
    }
    for (const Route& route : plan.routes) {
      if (route.src != own_) continue;
      SentRoute sent{.tensor = tensor, .reduction = SentRoute::kNone, .region = route.region};
      if (match_.tensors[tensor].src.has_partial())
        sent.reduction = static_cast<uint32_t>(
            first_reduction + reduction_of(std::span(routes_.reductions).subspan(first_reduction), route.region,
                                           [](const OwnedReduction& made) -> const Region& { return made.region; }));
      const LinkRoute link{.tensor = tensor,
                           .route = static_cast<uint32_t>(routes_.sent.size()),
                           .region = route.region,
                           .src_owned = sent.reduction == SentRoute::kNone ? owned(tensor) : route.region};
      for (const Rank dst : plan.dsts(route)) routes_.by_peer[static_cast<size_t>(dst - sender_world_)].push_back(link);
      routes_.sent.push_back(std::move(sent));
    }
  }

 private:
  Region owned(uint32_t tensor) const { return match_.tensors[tensor].src.owned(match_.tensors[tensor].shape, own_); }

  BatchRoutes& routes_;
  const Match& match_;
  const Rank sender_world_;
  const Rank own_;
};

void add_received(BatchRoutes& routes, const Match::Tensor& tensor, uint32_t ordinal, Rank dst, const Plan& plan) {
  for (const Route& route : plan.routes) {
    if (!std::ranges::binary_search(plan.dsts(route), dst)) continue;
    routes.by_peer[static_cast<size_t>(route.src)].push_back(
        {.tensor = ordinal,
         .route = 0,
         .region = route.region,
         .src_owned = tensor.src.has_partial() ? route.region : tensor.src.owned(tensor.shape, route.src)});
  }
}

}  // namespace

BatchRoutes plan_batch(const Match& match, int sender_world, int receiver_world, bool sends, Rank own) {
  BatchRoutes routes;
  routes.by_peer.resize(static_cast<size_t>(sends ? receiver_world : sender_world));
  routes.reduced_by.resize(static_cast<size_t>(sends ? sender_world : 0));
  BatchPlanner planner({.hosts = {}, .min_piece_bytes = kBusMinPiece});
  for (const Match::Tensor& tensor : match.tensors) {
    try {
      planner.add({tensor.shape, tensor.src_dtype, tensor.wire}, tensor.src, tensor.dst.shifted(sender_world));
    } catch (const Error& error) {
      fail(error.code(), "tensor {}: {}"_message, tensor.name, error.what());
    }
  }
  SenderRoutes sender(routes, match, sender_world, own);
  for (uint32_t ordinal = 0; ordinal < planner.size(); ++ordinal) {
    const Rank rank = sends ? own : own + sender_world;
    const Plan plan = planner.plan_for(ordinal, rank);
    if (sends)
      sender.add(ordinal, plan);
    else
      add_received(routes, match.tensors[ordinal], ordinal, rank, plan);
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
