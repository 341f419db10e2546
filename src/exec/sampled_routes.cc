#include "exec/sampled_routes.h"

namespace tessera {

void SampledRoutes::add(const RouteRegion& what, bool quantised) {
  routes_.push_back({.tensor = what.tensor,
                     .quantised = quantised,
                     .image = quantised ? ImageRange{} : image_range(what),
                     .elements = static_cast<uint64_t>(what.region.size())});
  held_.push_back(1);
  count_ = routes_.size();
  all_ = true;
}

void SampledRoutes::draw(const SampleSeed& version) {
  all_ = !version;
  count_ = routes_.size();
  if (all_) return;
  count_ = 0;
  for (size_t i = 0; i < routes_.size(); ++i) {
    const Route& route = routes_[i];
    held_[i] =
        route.quantised || DigestSample(*version, route.tensor).touches(route.image.begin, route.image.end) ? 1 : 0;
    count_ += held_[i];
  }
}

}  // namespace tessera
