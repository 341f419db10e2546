// How the members of a holder class share the elements that they serve.
#pragma once

#include <span>
#include <vector>

#include "plan/kind.h"

namespace tessera::plan {

// `src` serves the elements from the end of the previous share to `end`.
struct Share {
  Index end = 0;
  Rank src = 0;
};

// The start of the k-th of `parts` nearly equal parts of `total`; the first total % parts of them are longer by one.
inline Index part_begin(Index total, Index parts, Index k) {
  return total / parts * k + std::min(k, total % parts);
}

struct ShareOptions {
  const HostMap* hosts = nullptr;
  int rotation = 0;     // which candidate comes first
  Index min_share = 1;  // elements
};

// Cuts `total` elements into at most one share for each candidate: equal over the candidates' hosts first, then over
// the ranks of each host. Empty shares are left out. REQUIRES: candidates, total > 0.
std::vector<Share> share_out(Index total, std::span<const Rank> candidates, const ShareOptions& options);

// The number of shares of at least `min_share` elements that `total` gives to `candidates` ranks.
Index share_count(Index total, Index candidates, Index min_share);

// The smallest share, in elements, whose pieces are all at least the options' min_piece_bytes.
Index share_minimum(const Kind& kind, const PlanOptions& options);

}  // namespace tessera::plan
