// How ranks find each other through the store. Calls block.
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
#include "bus/registration/wait_hints.h"
#include "peer/agent.h"
#include "peer/alarm.h"
#include "peer/call_limits.h"
#include "tessera/bus.h"
#include "tessera/store.h"

namespace tessera::bus {

// The ranks of both sides of a pair, by rank. Fixed once all have joined.
struct PairView {
  std::string name;
  std::string peer_job;
  std::vector<RankRecord> own;
  std::vector<RankRecord> peer;
  int64_t revision = 0;  // of this rank's record: a later one means that it has joined again
  // Several peer jobs instead of one, in alphabetical order, which were not waited for. `peer_job` is the first of
  // them, for what this job's ranks tell each other.
  std::vector<std::string> jobs = {};
  std::vector<std::string> named() const { return jobs.empty() ? std::vector{peer_job} : jobs; }
  // The view of one of them, before its ranks are known.
  PairView of(const std::string& job) const {
    return {.name = name, .peer_job = job, .own = {}, .peer = {}, .revision = 0};
  }
};

// Thread-safe. Every call throws kDeadlineExceeded at its deadline, and kCancelled once its `stop` is requested; the
// message names who is missing.
class Rendezvous {
 public:
  // `own` tells the others how to reach this rank. `waits` shows whom it waits for. `loop` watches the other processes;
  // it outlives this.
  Rendezvous(Store& store, Identity identity, RankRecord own, WaitList& waits, EventLoop& loop);
  ~Rendezvous();  // ends the lease: this rank's keys are removed

  // Claims (job, rank) for this process. It replaces a dead holder; for a living one it throws kAlreadyExists with both
  // pids. If it cannot tell (another pid namespace), it waits until the holder's lease ends, unless torchrun has
  // restarted the job since.
  void claim(const CallLimits& limits);
  // Waits until all ranks of both sides have joined; every 10 s a log line says who is missing.
  PairView join(const std::string& pair, const std::string& peer_job, const CallLimits& limits);
  // Likewise with several jobs, in alphabetical order: waits only for the ranks of this job.
  PairView join(const std::string& pair, const std::vector<std::string>& jobs, const CallLimits& limits);
  // Likewise, for a rank that has joined: processes may have been replaced since, and jobs may come back with another
  // world.
  PairView rejoin(const PairView& view, const CallLimits& limits);
  // Whether a rank of the view is another process by now.
  bool is_outdated(const PairView& view, const CallLimits& limits);
  // Calls `changed`, on the store client's thread, once a rank of the two jobs is another process than in `view`; with
  // `parts`, also once a rank of the peer job has left.
  std::unique_ptr<Watch> watch_pair(const PairView& view, bool parts, std::function<void()> changed);
  // Calls `met`, on the same thread, for each other job that registers the batch with this one, now and later; possibly
  // more than once. An empty name means that events were missed: watch again.
  std::unique_ptr<Watch> watch_jobs(const std::string& pair, const std::string& batch,
                                    const std::function<void(const std::string& job)>& met);
  // Records that a pair of this process names the jobs of the view, until it is dropped: then is_named() holds for
  // them.
  void keep(const PairView& view);
  void drop(const PairView& view);
  bool is_named(const std::string& pair, const std::string& job) const;
  // Tells the ranks of the pair that are still there that this rank will not register anything more, and why; but not
  // the jobs that another pair of this process names nor, while there is another pair of that name, this job's ranks.
  void leave(const PairView& view, const Status& reason, bool lasting);
  // The ranks of this job decide on a staged version with one compare-and-set. The first decides; returns whether the
  // version is taken. Removes `before`, the decision on an earlier version. Throws kUnavailable if the store cannot be
  // reached.
  static constexpr Duration kDecisionTimeout = seconds(5);
  bool decide(const std::string& key, bool commit, const std::string& before, Duration timeout);
  std::string decision_key(const PairView& view, const std::string& batch, const std::string& session,
                           uint32_t epoch) const;
  void forget_decision(const std::string& key);

  // --- what registrations of batches use ---
  const Identity& identity() const { return identity_; }
  const RankRecord& own() const { return own_; }
  Store& store() const { return store_; }
  EventLoop& loop() const { return loop_; }
  LeaseId lease() const { return lease_; }
  // Waits for the contents of `prefix`. `missing` says in words who is waited for. `look` checks on them, and may
  // throw: it is called once the wait has taken kSilence, and each time `alarm` rings. False: it could not check, and
  // is called again. `awaited` lists the missing ranks, for wait_hint(), once a message is about to name them.
  struct Waited {
    std::string what;
    std::string_view until;  // what the missing ranks are expected to do: "to join"
    std::function<std::string(const StoreView&)> missing;
    std::function<std::vector<AwaitedRanks>(const StoreView&)> awaited;
    std::string place = {};  // where this process looks for them, for a message without a hint
    std::function<bool(const StoreView&)> look;
    Alarm* alarm = nullptr;
  };
  StoreView wait(const std::string& prefix, const Store::Predicate& complete, const Waited& waited,
                 const CallLimits& limits);
  // The record's revision. `lasting`: the record outlives this process.
  int64_t publish_failure(const std::string& key, const FailureRecord& record, bool lasting);

 private:
  // Publishes that this rank has joined, and the jobs that it wants, including those that it has joined before under
  // this name; returns the revision.
  int64_t publish_pair(const std::string& pair, const std::vector<std::string>& jobs, const CallLimits& limits);
  PairView await_pair(const std::string& pair, const std::string& peer_job, int64_t revision, int64_t failures_from,
                      const CallLimits& limits);
  std::string place() const;  // where this process meets others, in words
  // Whether pairs of this process name other jobs besides that one.
  bool names_others(const std::string& pair, const std::string& job) const;

  Store& store_;
  WaitList& waits_;
  EventLoop& loop_;
  const Identity identity_;
  const RankRecord own_;
  LeaseId lease_ = kNoLease;  // from claim() on
  mutable Mutex mutex_;
  struct Joined {
    int64_t revision = 0;  // of the last time it joined
    int pairs = 0;         // that are kept
  };
  std::map<std::string, std::map<std::string, Joined>> joined_ GUARDED_BY(mutex_);  // by pair and job
};

}  // namespace tessera::bus
