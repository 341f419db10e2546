// The digests of what one source sends, beside those of what has arrived. On the loop's thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "bus/session/versions.h"
#include "exec/digests.h"
#include "peer/exchange/pull_end.h"

namespace tessera::bus {

class PullDigests {
 public:
  explicit PullDigests(const PullEnd& exchange);

  // Of the pull that begins none are there yet.
  void begin() { have_ = false; }
  bool have() const { return have_; }
  // Memory for the next message.
  Digests room() { return {.digests = std::move(spare_)}; }
  // Throws Error(kMismatch) if they are not what the source owes.
  void receive(Digests digests);

  // Among a run's and among the source's.
  struct Place {
    size_t own = 0;
    size_t sent = 0;
  };
  // One that differs between what was sent and `own`, what a run has computed, of the route at `position` of the
  // program; none: they agree. `as_delta`: that is how it travelled. REQUIRES: have()
  std::optional<Place> differing(size_t position, bool as_delta, std::span<const Digest> own) const;
  const Digest& sent(const Place& place) const { return sent_[place.sent]; }
  // Those of the routes, added to the sum of each one's tensor.
  void add_to(std::span<Digest> sums) const;

 private:
  const PullEnd& exchange_;
  DigestTable sent_table_;  // of all routes
  DigestTable own_table_;   // of those that are pulled
  std::vector<Digest> sent_;
  std::vector<Digest> spare_;
  bool have_ = false;
};

}  // namespace tessera::bus
