#include "bus/receiver/wanted_routes.h"

#include <utility>

#include "exec/wire/wire_piece.h"

namespace tessera::bus {

std::vector<WantedRoute> wanted_routes(const SessionSetup& setup, Rank rank, std::span<const uint32_t> ties) {
  const std::vector<LinkRoute>& routes = setup.routes.by_peer[static_cast<size_t>(rank)];
  std::vector<WantedRoute> wanted;
  wanted.reserve(routes.size());
  for (const LinkRoute& route : routes) {
    const Match::Tensor& matched = setup.agreement.match.tensors[route.tensor];
    const LocalTensor& local = setup.tensors[route.tensor];
    WantedRoute one;
    one.route.what = {
        .tensor = route.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = route.region};
    one.route.src.owned = route.src_owned;
    one.route.dst = local.array;
    one.route.dst_dtype = local.dtype;
    one.route.data = local.data;
    one.per_route = matched.src.has_partial() || setup.agreement.delta;
    one.skipped = ties[route.tensor] != route.tensor;
    if (setup.staged && !setup.agreement.delta && !matched.wire) {
      const LocalTensor& registered = setup.staged_terms[route.tensor];
      if (setup.runs->reaches(registered.data)) one.registered = {.dst = registered.array, .data = registered.data};
    }
    if (matched.wire) {
      one.route.wire = std::make_shared<WirePiece>(wire_region(matched, route.region));
      one.route.what = piece_region(route.tensor, *one.route.wire);
      one.route.src.owned = one.route.what.region;
      one.route.planes = local.planes;
      if (!local.planes.empty()) one.route.dst = {.owned = local.held, .strides = {}};
      one.per_route = true;
    }
    wanted.push_back(std::move(one));
  }
  return wanted;
}

}  // namespace tessera::bus
