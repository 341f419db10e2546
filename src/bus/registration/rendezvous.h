// How ranks find each other and agree: blocking conversations with the store, on the user's thread.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bus/registration/manifest.h"
#include "bus/registration/records.h"
#include "peer/agent.h"
#include "peer/call_limits.h"
#include "peer/stop_detector.h"
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
};

// What both sides registered under one batch.
struct Agreement {
  Match match;
  std::string session;         // equal on all ranks of both sides that read the same registrations
  bool digest = true;          // nobody switched it off
  bool delta = false;          // all asked for it
  int64_t sent_version = 0;    // the last that a sending rank knows of
  int64_t newest_version = 0;  // that one has offered, sent or not
  int64_t floor = 0;           // versions up to this are held by all receiving ranks
  // Whose registrations it is built on: own ranks, then the peer's.
  std::vector<Registration> members;
};

// Thread-safe. Every call throws kDeadlineExceeded at its deadline, and kCancelled once its `stop` is requested, naming
// who is missing.
class Rendezvous {
 public:
  // `own` tells the others how to reach this rank. `waits` is told whom it waits for.
  Rendezvous(Store& store, Identity identity, RankRecord own, WaitList& waits);
  ~Rendezvous();  // gives the lease back: this rank's keys go

  // Claims (job, rank) for this process. A dead holder is replaced, a living one is kAlreadyExists with both pids; one
  // that cannot be judged (another pid namespace) is waited for until its lease ends, unless torchrun has restarted the
  // job since.
  void claim(const CallLimits& limits);
  // Waits until all ranks of both sides are in; every 10 s a line in the log says who is missing.
  PairView join(const std::string& pair, const std::string& peer_job, const CallLimits& limits);
  // Likewise once this rank is in: processes may have been replaced since, and jobs come back with another world.
  PairView rejoin(const PairView& view, const CallLimits& limits);
  // A registration of `batch` begins, unless one has and was not withdrawn: what is reported from now on is about it.
  // exchange() and peer_manifest() begin by themselves.
  void begin(const PairView& view, const std::string& batch);
  // Publishes what this rank registers and reads what all others do.
  struct Offer {
    bool sends = false;
    bool digest = true;
    bool delta = false;
    int64_t version = 0;  // sent last, or held
    int64_t newest = 0;   // offered, at least `version`
    const Manifest* manifest = nullptr;
  };
  Agreement exchange(const PairView& view, const std::string& batch, const Offer& own, const CallLimits& limits);
  // Calls `changed`, on the store client's thread, when a rank that `agreement` is built on registers anew, or asks
  // this rank to; for every one if what came meanwhile was missed. Calls `gave_up` when one of them gives up what
  // `agreement` is built on.
  std::unique_ptr<Watch> watch(const PairView& view, const std::string& batch, const Agreement& agreement,
                               const std::function<void(const std::string& rank)>& changed,
                               const std::function<void(const Status& why)>& gave_up);
  // Calls `changed`, there, once a rank of the two jobs is another process than in `view`; if it `parts`, once one of
  // the peer job has left, too.
  std::unique_ptr<Watch> watch_pair(const PairView& view, bool parts, std::function<void()> changed);
  // Calls `met`, there, for each other job that registers the batch with this one, now and later; often more than once.
  // With an empty name: watch anew, something was missed.
  std::unique_ptr<Watch> watch_jobs(const std::string& pair, const std::string& batch,
                                    const std::function<void(const std::string& job)>& met);
  // What the other side offers.
  Manifest peer_manifest(const PairView& view, const std::string& batch, const CallLimits& limits);
  // What every rank of this job says about a batch that it is about to register, by rank.
  std::vector<std::string> all_gather(const PairView& view, const std::string& batch, const std::string& value,
                                      const CallLimits& limits);
  // Takes back what this rank has said, now that it has the batch no longer. (A registration that begins anew leaves
  // it: a rank that comes back reads it.)
  void unsay(const PairView& view, const std::string& batch);
  // Tells the other ranks that this one gave the batch up, and why; they fail with it. What was cancelled is forgotten
  // once this rank registers the batch again, or leaves: it leaves nothing behind for those that come later.
  void report(const PairView& view, const std::string& batch, const Status& status);
  // Whether the registration that was begun last ended with what another rank had reported.
  bool was_told(const PairView& view, const std::string& batch) const;
  // Tells those of the pair that are still there that this rank will register nothing more, and why.
  void leave(const PairView& view, const Status& reason, bool lasting);
  // What the ranks of this job do with a staged version: one compare-and-set. Whoever comes first decides; returns
  // whether it is taken. `before`, the decision on an earlier one, is forgotten. Throws kUnavailable if the store
  // cannot be reached.
  static constexpr Duration kDecisionTimeout = seconds(5);
  bool decide(const std::string& key, bool commit, const std::string& before, Duration timeout);
  std::string decision_key(const PairView& view, const std::string& batch, const std::string& session,
                           uint32_t epoch) const;
  void forget_decision(const std::string& key);
  // Takes this rank's records of a batch back.
  void withdraw(const PairView& view, const std::string& batch);

 private:
  struct Side {
    Manifest manifest;
    bool digest = true;
    bool delta = true;
    std::vector<int64_t> versions;      // by rank
    int64_t newest = 0;                 // of all
    std::vector<Registration> members;  // by rank
  };
  // What this rank knows of earlier registrations of a batch, so that a new one is not built on what they left. Kept as
  // long as the rank: an id may be used again at any time.
  struct History {
    uint32_t attempt = 0;               // of this rank, the last
    std::map<uint64_t, uint32_t> past;  // by speaker: the newest registration that ended with an earlier attempt
    std::map<uint64_t, uint32_t> read;  // those that the present attempt has read
    int64_t ended = 0;                  // revision of the newest failure that an attempt ended with
    bool heard = false;                 // the present attempt ended with another's failure
    bool over = true;                   // it was withdrawn, or another's failure has ended it
    bool asked = false;                 // others to renew theirs
    bool said = false;                  // something, by all_gather()
    History next() const;               // that of the next attempt, as it begins
  };
  // A side of a batch as its records are waited for.
  struct Awaited {
    const PairView& view;
    const std::string& batch;
    const std::string& job;
    const std::vector<RankRecord>& ranks;
    const History& history;
    uint64_t speaker(size_t rank) const;  // that rank of that process, as a number
    std::vector<Rank> missing(const std::function<std::string(Rank)>& key, const StoreView& items) const;
    // Whether `key` holds a record of that rank's that is newer than what an earlier attempt has read.
    bool is_fresh(size_t rank, const std::string& key, const StoreView& items) const;
  };
  std::string meeting(const PairView& view, const std::string& batch) const;
  PairView await_pair(const std::string& pair, const std::string& peer_job, int64_t revision, int64_t failures_from,
                      const CallLimits& limits);
  History begun(const PairView& view, const std::string& batch);
  History& history_of(const PairView& view, const std::string& batch);  // under mutex_
  // Unless this rank is asked to renew its registration meanwhile.
  std::optional<Agreement> try_exchange(const PairView& view, const std::string& batch, const Offer& own,
                                        const CallLimits& limits);
  // Asks whoever has kept a registration that an earlier attempt of this rank has read.
  void ask_to_renew(const Awaited& own_side, const Awaited& peers, const CallLimits& limits);
  bool is_asked_to_renew(const Awaited& by, const StoreView& items) const;
  void forget_asking(const PairView& view, const std::string& batch, Duration timeout);
  // Fresh records of all its ranks, unless those of the `other` side give up, or somebody asks for another registration
  // of this rank's.
  StoreView await_side(const Awaited& side, std::optional<Awaited> other, const CallLimits& limits);
  // The present attempt is built on these.
  void remember(const Awaited& side, const StoreView& items);
  Side judge_side(const PairView& view, const std::string& batch, const std::string& job, size_t world, bool sends,
                  const StoreView& items) const;
  // Waits for what `prefix` holds. `missing` says in words who is waited for; `check`, called every kCheckPeriod, may
  // throw.
  struct Waited {
    std::string what;
    std::string_view until;  // what is waited for those that are missing to do: "to join"
    std::function<std::string(const StoreView&)> missing;
    std::function<void(const StoreView&)> check;
  };
  StoreView wait(const std::string& prefix, const Store::Predicate& complete, const Waited& waited,
                 const CallLimits& limits);
  void throw_if_failed(const Awaited& side, const StoreView& items);
  // The present attempt ends with the failure of `whose` ("trainer/0"): what to throw.
  Status hear(const PairView& view, const std::string& batch, const std::string& whose, const FailureRecord& record,
              int64_t revision);
  // Throws if one of the `missing` ranks has left the pair or died.
  void throw_if_gone(const Awaited& side, const std::vector<Rank>& missing, Deadline deadline) const;
  // Likewise if one is stopped.
  using StopDetectors = std::map<Rank, StopDetector>;
  static void throw_if_stopped(const Awaited& side, const std::vector<Rank>& missing, StopDetectors& detectors);
  // Its revision. `lasting`: it outlives this process.
  int64_t publish_failure(const std::string& key, const FailureRecord& record, bool lasting);

  Store& store_;
  WaitList& waits_;
  const Identity identity_;
  const RankRecord own_;
  LeaseId lease_ = kNoLease;
  mutable std::mutex mutex_;
  std::map<std::string, History> histories_;  // by meeting; guarded by mutex_
};

}  // namespace tessera::bus
