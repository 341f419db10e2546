// The digests of what one source sends, to compare with those of what has arrived. On the loop's thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "bus/session/versions.h"
#include "exec/digests.h"
#include "exec/sampled_routes.h"
#include "peer/exchange/pull_end.h"

namespace tessera::bus {

class PullDigests {
 public:
  explicit PullDigests(const PullEnd& exchange);

  // A pull begins: there are no digests for it yet.
  void begin() { have_ = false; }
  bool have() const { return have_; }
  // Memory for the next message.
  Digests room() { return {.digests = std::move(spare_)}; }
  // `version`: the seed of its sample, if digests are sampled. Throws Error(kMismatch) if they do not fit what the
  // source must send.
  void receive(Digests digests, const SampleSeed& version);

  // Indices into a run's digests and into the source's.
  struct Place {
    size_t own = 0;
    size_t sent = 0;
  };
  // Whether the route at `position` of the program has digests to compare. REQUIRES: have()
  bool compares(size_t position) const { return sampled_.holds(exchange_.pulled()[position]); }
  // A digest that differs between what was sent and `own`, what a run has computed, for the route at `position` of the
  // program; none: they agree. `as_delta`: whether it travelled so. REQUIRES: have()
  std::optional<Place> differing(size_t position, bool as_delta, std::span<const Digest> own) const;
  const Digest& sent(const Place& place) const { return sent_[place.sent]; }
  // Adds the digests of the routes to the sums of their tensors.
  void add_to(std::span<Digest> sums) const;

 private:
  const PullEnd& exchange_;
  DigestTable sent_table_;  // of all routes
  DigestTable own_table_;   // of the routes that are pulled
  SampledRoutes sampled_;   // of all routes
  std::vector<Digest> sent_;
  std::vector<Digest> spare_;
  bool have_ = false;
};

}  // namespace tessera::bus
