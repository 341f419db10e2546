#include "tessera/plan.h"

#include <algorithm>

#include "base/fail.h"

namespace tessera {

std::string_view to_string(RouteKind kind) {
  switch (kind) {
    case RouteKind::kLocal:
      return "local";
    case RouteKind::kP2P:
      return "p2p";
    case RouteKind::kMulticast:
      return "multicast";
  }
  return "unknown";
}

std::vector<std::pair<Rank, int64_t>> Plan::egress() const {
  std::vector<std::pair<Rank, int64_t>> sent;
  for (const Route& route : routes) {
    if (route.kind == RouteKind::kLocal) continue;
    if (!sent.empty() && sent.back().first == route.src)
      sent.back().second += route.bytes;
    else
      sent.emplace_back(route.src, route.bytes);
  }
  std::ranges::sort(sent);
  size_t kept = 0;
  for (size_t i = 0; i < sent.size(); ++i) {
    if (kept > 0 && sent[kept - 1].first == sent[i].first)
      sent[kept - 1].second += sent[i].second;
    else
      sent[kept++] = sent[i];
  }
  sent.resize(kept);
  return sent;
}

// tensor 4096x4096 bf16
// from dp=2,fsdp=4@0-7:R,S0
// to tp=4@8-11:S1
// route p2p 0 -> 8 [0:512][0:1024] 1048576
// reduce sum 0 of 0,1 [0:512][0:1024]
// total delivered=... moved=...
std::string Plan::dump() const {
  fmt::memory_buffer out;
  const auto line = [&]<typename... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
    out.push_back('\n');
  };
  line("tensor {} {}", to_string_shape(meta.shape), tessera::to_string(meta.dtype));
  line("from {}", src.to_string());
  line("to {}", dst.to_string());
  for (const Reduction& r : reductions)
    line("reduce {} {} of {} {}", tessera::to_string(r.op), r.owner, fmt::join(peers(r), ","), r.region.to_string());
  for (const Route& r : routes)
    line("route {} {} -> {} {} {}", tessera::to_string(r.kind), r.src, fmt::join(dsts(r), ","), r.region.to_string(),
         r.bytes);
  line("total routes={} delivered={} moved={} lower_bound={} between_hosts={} reduction={}", stats.routes,
       stats.bytes_delivered, stats.bytes_moved, stats.bytes_lower_bound, stats.bytes_between_hosts,
       stats.reduction_bytes);
  line("egress max={} lower_bound={}", stats.max_egress, stats.max_egress_lower_bound);
  return fmt::to_string(out);
}

}  // namespace tessera
