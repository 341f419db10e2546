#include "bus/sender/served_routes.h"

namespace tessera::bus {
namespace {

SourceRoute source_route(const SessionSetup& setup, const LinkRoute& route, const LocalTensor& local) {
  const Match::Tensor& matched = setup.agreement.match.tensors[route.tensor];
  return {.what = {.tensor = route.tensor, .shape = matched.shape, .dtype = matched.src_dtype, .region = route.region},
          .src = local.array,
          .data = local.data};
}

}  // namespace

ServedRoute sent_elements(const SessionSetup& setup, const Reducer* reducer, const SentRoute& route, uint32_t slot) {
  ServedRoute served;
  served.route = source_route(setup, {.tensor = route.tensor, .route = 0, .region = route.region, .src_owned = {}},
                              setup.tensors[route.tensor]);
  served.slot_bytes = setup.slot_bytes;
  if (route.reduction != SentRoute::kNone) {
    SourceRoute& source = served.route;
    source.src = {.owned = route.region, .strides = byte_strides(source.what.dtype, route.region.extents())};
    source.data = reducer->result(route.reduction);
    served.slot_bytes = setup.slots > 1 ? reducer->slot_bytes() : 0;
    served.per_route = true;
  }
  served.route.data += slot * served.slot_bytes;
  return served;
}

ServedRoute sent_route(const SessionSetup& setup, const Preparation& preparation, uint32_t sent, uint32_t slot) {
  return preparation.quantises(sent) ? preparation.quantizer()->piece(sent, slot)
                                     : sent_elements(setup, preparation.reducer(), setup.routes.sent[sent], slot);
}

std::vector<ServedRoute> served_to(const SessionSetup& setup, const Preparation& preparation, const Caller& caller) {
  std::vector<ServedRoute> all;
  const auto rank = static_cast<size_t>(caller.hello.rank);
  if (caller.attach.purpose == Attach::Purpose::kReduce) {
    for (const LinkRoute& route : setup.routes.reduced_by[rank])
      all.push_back({.route = source_route(setup, route, setup.terms()[route.tensor])});
    return all;
  }
  const DeltaEncoder* deltas = preparation.deltas();
  for (const LinkRoute& route : setup.routes.by_peer[rank]) {
    ServedRoute served = sent_route(setup, preparation, route.route, 0);
    if (deltas != nullptr && deltas->covers(route.route)) deltas->place(route.route, served);
    all.push_back(std::move(served));
  }
  return all;
}

}  // namespace tessera::bus
