// How ranks find each other: conversations with the store that block.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "bus/registration/records.h"
#include "peer/agent.h"
#include "peer/alarm.h"
#include "peer/call_limits.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {

// The ranks of both sides of a pair, by rank. Fixed once they have met.
struct PairView {
  std::string name;
  std::string peer_job;
  std::vector<RankRecord> own;
  std::vector<RankRecord> peer;
  int64_t revision = 0;  // of this rank's record: a later one tells that it has joined again
  // In place of one peer job several, in alphabetical order, which were not waited for. `peer_job` is the first of
  // them, for what the own ranks say to each other.
  std::vector<std::string> jobs = {};
  std::vector<std::string> named() const { return jobs.empty() ? std::vector{peer_job} : jobs; }
  // That of one of them, before its ranks are known.
  PairView of(const std::string& job) const {
    return {.name = name, .peer_job = job, .own = {}, .peer = {}, .revision = 0};
  }
};

// Thread-safe. Every call throws kDeadlineExceeded at its deadline, and kCancelled once its `stop` is requested, naming
// who is missing.
class Rendezvous {
 public:
  // `own` tells the others how to reach this rank. `waits` is told whom it waits for. On `loop` it is seen what becomes
  // of them; it outlives this.
  Rendezvous(Store& store, Identity identity, RankRecord own, WaitList& waits, EventLoop& loop);
  ~Rendezvous();  // gives the lease back: this rank's keys go

  // Claims (job, rank) for this process. A dead holder is replaced, a living one is kAlreadyExists with both pids; one
  // that cannot be judged (another pid namespace) is waited for until its lease ends, unless torchrun has restarted the
  // job since.
  void claim(const CallLimits& limits);
  // Waits until all ranks of both sides are in; every 10 s a line in the log says who is missing.
  PairView join(const std::string& pair, const std::string& peer_job, const CallLimits& limits);
  // Likewise with several jobs, in alphabetical order: waits for the ranks of the own one only.
  PairView join(const std::string& pair, const std::vector<std::string>& jobs, const CallLimits& limits);
  // Likewise once this rank is in: processes may have been replaced since, and jobs come back with another world.
  PairView rejoin(const PairView& view, const CallLimits& limits);
  // Calls `changed`, on the store client's thread, once a rank of the two jobs is another process than in `view`; if it
  // `parts`, once one of the peer job has left, too.
  std::unique_ptr<Watch> watch_pair(const PairView& view, bool parts, std::function<void()> changed);
  // Calls `met`, there, for each other job that registers the batch with this one, now and later; often more than once.
  // With an empty name: watch again, something was missed.
  std::unique_ptr<Watch> watch_jobs(const std::string& pair, const std::string& batch,
                                    const std::function<void(const std::string& job)>& met);
  // A pair of this process names the jobs of the view, until it is dropped: is_named() by then.
  void keep(const PairView& view);
  void drop(const PairView& view);
  bool is_named(const std::string& pair, const std::string& job) const;
  // Tells those of the pair that are still there that this rank will register nothing more, and why; but not the jobs
  // that another pair of this process names, nor, while there is one of that name, the own ranks.
  void leave(const PairView& view, const Status& reason, bool lasting);
  // What the ranks of this job do with a staged version: one compare-and-set. Whoever comes first decides; returns
  // whether it is taken. `before`, the decision on an earlier one, is forgotten. Throws kUnavailable if the store
  // cannot be reached.
  static constexpr Duration kDecisionTimeout = seconds(5);
  bool decide(const std::string& key, bool commit, const std::string& before, Duration timeout);
  std::string decision_key(const PairView& view, const std::string& batch, const std::string& session,
                           uint32_t epoch) const;
  void forget_decision(const std::string& key);

  // --- what registrations of batches are made of ---
  const Identity& identity() const { return identity_; }
  const RankRecord& own() const { return own_; }
  Store& store() const { return store_; }
  EventLoop& loop() const { return loop_; }
  LeaseId lease() const { return lease_; }
  // Waits for what `prefix` holds. `missing` says in words who is waited for. `look` looks after those, and may throw:
  // it is called once that has taken kSilence, and each time `alarm` rings; false: it could not, and is to again.
  struct Waited {
    std::string what;
    std::string_view until;  // what is waited for those that are missing to do: "to join"
    std::function<std::string(const StoreView&)> missing;
    std::function<bool(const StoreView&)> look;
    Alarm* alarm = nullptr;
  };
  StoreView wait(const std::string& prefix, const Store::Predicate& complete, const Waited& waited,
                 const CallLimits& limits);
  // Its revision. `lasting`: it outlives this process.
  int64_t publish_failure(const std::string& key, const FailureRecord& record, bool lasting);

 private:
  // Publishes that this rank has joined, and whom it wants, those included that it has joined the pair with before; the
  // revision of that.
  int64_t publish_pair(const std::string& pair, const std::vector<std::string>& jobs, const CallLimits& limits);
  PairView await_pair(const std::string& pair, const std::string& peer_job, int64_t revision, int64_t failures_from,
                      const CallLimits& limits);
  // Whether pairs of this process name jobs besides that one.
  bool names_others(const std::string& pair, const std::string& job) const;

  Store& store_;
  WaitList& waits_;
  EventLoop& loop_;
  const Identity identity_;
  const RankRecord own_;
  LeaseId lease_ = kNoLease;  // from claim() on
  mutable Mutex mutex_;
  struct Joined {
    int64_t revision = 0;  // at which it last was
    int pairs = 0;         // that are kept
  };
  std::map<std::string, std::map<std::string, Joined>> joined_ GUARDED_BY(mutex_);  // by pair and job
};

}  // namespace tessera::bus
