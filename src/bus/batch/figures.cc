#include "bus/batch/figures.h"

#include <utility>

namespace tessera::bus {

Figures::Figures(const Agent& agent, const Store& store)
    : agent_(agent), store_(store), created_(Clock::steady().now()) {}

BatchStats Figures::begin_session(const SessionSetup& made, const RankShare& share) {
  const PlanStats& plan = made.routes.stats;
  const Match& match = made.agreement.match;
  std::vector<std::string> names;
  for (const LocalTensor& tensor : made.tensors) names.push_back(tensor.name);
  const MutexLock lock(mutex_);
  const int64_t sessions = newest_.sessions + 1;
  newest_ = {
      .tensors = static_cast<int64_t>(match.tensors.size()),
      .skipped = match.skipped,
      .routes = plan.routes,
      .bytes_moved = plan.bytes_moved,
      .bytes_lower_bound = plan.bytes_lower_bound,
      .rank_bytes = share.bytes,
      .sessions = sessions,
      .register_seconds = sessions == 1 ? to_seconds(Clock::steady().now() - created_) : newest_.register_seconds,
      .quantized_elements = share.quantized_elements,
      .quantized_bytes = share.quantized_bytes,
      .quantized_source_bytes = share.quantized_source_bytes,
      .quantized_elements_moved = plan.quantized_elements_moved,
      .quantized_bytes_moved = plan.quantized_bytes_moved};
  names_ = std::move(names);
  digests_.clear();
  begin_count();
  return newest_;
}

void Figures::count_from_now() {
  const MutexLock lock(mutex_);
  begin_count();
}

void Figures::begin_count() {
  allocations_at_start_ = allocations_.load();
  plans_at_start_ = agent_.plans();
  store_requests_at_start_ = store_.requests();
}

void Figures::count_moved(int64_t bytes, const DeltaBytes& deltas) {
  bytes_moved_ += bytes;
  delta_routes_ += deltas.routes;
  delta_bytes_ += deltas.read;
  delta_full_bytes_ += deltas.full;
}

void Figures::keep_sums() {
  const MutexLock lock(mutex_);
  digests_.swap(sums_);
}

BatchStats Figures::stats() const {
  const MutexLock lock(mutex_);
  BatchStats stats = newest_;
  stats.transfers = transfers_.load();
  stats.snapshot_bytes = snapshot_bytes_.load();
  stats.amax_exchanges = amax_exchanges_.load();
  stats.store_requests = static_cast<int64_t>(store_.requests() - store_requests_at_start_);
  stats.plans = agent_.plans() - plans_at_start_;
  stats.allocations = allocations_.load() - allocations_at_start_;
  stats.delta_routes = delta_routes_.load();
  stats.delta_bytes = delta_bytes_.load();
  stats.delta_full_bytes = delta_full_bytes_.load();
  return stats;
}

std::vector<TensorDigest> Figures::digests() const {
  const MutexLock lock(mutex_);
  std::vector<TensorDigest> named;
  for (size_t i = 0; i < digests_.size(); ++i)
    named.push_back({.name = names_[i],
                     .d0 = digests_[i].d[0],
                     .d1 = digests_[i].d[1],
                     .elements = static_cast<int64_t>(digests_[i].elements)});
  return named;
}

}  // namespace tessera::bus
