#include "layout/job_ranks.h"

#include <algorithm>
#include <span>

#include "base/fail.h"

namespace tessera {

void require_ranks_of_job(const Layout& layout, int world) {
  const std::span<const Rank> ranks = layout.mesh().ranks();
  const Rank highest = ranks.empty() ? 0 : *std::ranges::max_element(ranks);
  if (highest < world) return;
  const std::string has = world == 1 ? "1 rank, 0" : fmt::format("{} ranks, 0 to {}", world, world - 1);
  fail(
      ErrorCode::kInvalidArgument,
      "layout {} is over {} ranks up to {}, but the job has {}: choose a mesh of those, or start the job with more ranks"_message,
      layout.to_string(), ranks.size(), highest, has);
}

}  // namespace tessera
