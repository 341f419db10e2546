// The statistics of a batch, and the digests of its last transfer.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "bus/registration/batch_routes.h"
#include "bus/session/session.h"
#include "codec/simd/digest.h"
#include "peer/agent.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {

// Thread-safe, except sums().
class Figures {
 public:
  // Both outlive it; they count plans and requests.
  Figures(const Agent& agent, const Store& store);

  // Starts the session with another job in which this rank has this share. Returns the figures of all sessions.
  BatchStats begin_session(const SessionSetup& made, const RankShare& share);
  void count_from_now();  // resets what a steady state has none of: plans, store requests, allocations
  void count_allocation() { ++allocations_; }
  void count_snapshots(uint64_t bytes) { snapshot_bytes_ = static_cast<int64_t>(bytes); }
  void count_amax_exchange() { ++amax_exchanges_; }
  void count_transfer() { ++transfers_; }
  void count_moved(int64_t bytes, const DeltaBytes& deltas);

  // Digests of the transfer that ends, by tensor, to be filled on the loop's thread; keep_sums() publishes them as the
  // result of digests() and clears them.
  std::vector<Digest>& sums() { return sums_; }
  void keep_sums();

  BatchStats stats() const;
  std::vector<TensorDigest> digests() const;
  int64_t transfers() const { return transfers_.load(); }
  int64_t bytes_moved() const { return bytes_moved_.load(); }

 private:
  void begin_count() REQUIRES(mutex_);

  const Agent& agent_;
  const Store& store_;
  const TimePoint created_;
  std::atomic<int64_t> transfers_{0};
  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> amax_exchanges_{0};
  std::atomic<int64_t> snapshot_bytes_{0};
  std::atomic<int64_t> bytes_moved_{0};
  std::atomic<int64_t> delta_routes_{0}, delta_bytes_{0}, delta_full_bytes_{0};
  std::vector<Digest> sums_;  // swapped with digests_
  mutable Mutex mutex_;
  BatchStats newest_ GUARDED_BY(mutex_);               // of the newest session
  std::vector<std::string> names_ GUARDED_BY(mutex_);  // of the batch's tensors
  std::vector<Digest> digests_ GUARDED_BY(mutex_);     // by tensor, of the last transfer
  int64_t allocations_at_start_ GUARDED_BY(mutex_) = 0;
  int64_t plans_at_start_ GUARDED_BY(mutex_) = 0;
  uint64_t store_requests_at_start_ GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::bus
