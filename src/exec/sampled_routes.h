// The routes of a connection that have bytes in the sample of a version. The digest of any other route is 0, whatever
// its bytes are, so it is neither sent nor compared: docs/formats/digest.md, "Sampled".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codec/simd/digest.h"
#include "codec/simd/digest_sample.h"
#include "exec/walk/route.h"

namespace tessera {

// Not thread-safe.
class SampledRoutes {
 public:
  // Digests of quantised routes are full: then `what` is not looked at.
  void add(const RouteRegion& what, bool quantised);

  // Draws the sample of a version; without a seed, all routes are in it.
  void draw(const SampleSeed& version);
  bool holds(size_t route) const { return all_ || held_[route]; }
  // The digest of a route that it does not hold: 0, of all its elements.
  Digest nothing(size_t route) const { return {.elements = routes_[route].elements}; }
  size_t count() const { return count_; }  // of those that it holds
  size_t size() const { return routes_.size(); }
  uint32_t tensor(size_t route) const { return routes_[route].tensor; }
  bool quantised(size_t route) const { return routes_[route].quantised; }

 private:
  struct Route {
    uint32_t tensor = 0;
    bool quantised = false;
    ImageRange image;
    uint64_t elements = 0;
  };
  std::vector<Route> routes_;
  std::vector<uint8_t> held_;  // by route, of the last draw()
  size_t count_ = 0;
  bool all_ = true;
};

}  // namespace tessera
