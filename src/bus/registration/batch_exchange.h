// A rank's registrations of one batch with one other job: what each rank offers, what all agree on, and what becomes of
// it. Conversations with the store that block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "bus/registration/match.h"
#include "bus/registration/records.h"
#include "bus/registration/rendezvous.h"
#include "peer/call_limits.h"
#include "peer/peer_watch.h"
#include "tessera/store.h"

namespace tessera::bus {

// What a rank registers.
struct BatchOffer {
  bool sends = false;
  bool digest = true;
  bool delta = false;
  int64_t version = 0;  // sent last, or held
  int64_t newest = 0;   // offered, at least `version`
  std::shared_ptr<const Manifest> manifest;
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

// Thread-safe; one registration at a time. Kept as long as the rank: an id may be used again at any time, and a new
// registration must not be built on what an earlier one left. The views are of the pair and the peer job that it was
// made for. What blocks throws kDeadlineExceeded at the deadline of its limits, and kCancelled once their `stop` is
// requested, naming who is missing.
class BatchExchange {
 public:
  BatchExchange(Rendezvous& rendezvous, std::string pair, std::string peer_job, std::string batch);
  BatchExchange(const BatchExchange&) = delete;
  BatchExchange& operator=(const BatchExchange&) = delete;

  // A registration begins, unless one has and was not withdrawn: what is reported from now on is about it. exchange(),
  // peer_manifest() and all_gather() begin by themselves.
  void begin();
  // Publishes what this rank registers and reads what all others do.
  Agreement exchange(const PairView& view, const BatchOffer& own, const CallLimits& limits);
  // Calls `changed`, on the store client's thread, when a rank that `agreement` is built on registers again, or asks
  // this rank to; for every one if what came meanwhile was missed. Calls `gave_up` when one of them gives up what
  // `agreement` is built on.
  using OnChanged = std::function<void(const std::string& rank)>;
  using OnGivenUp = std::function<void(const Status& why)>;
  std::unique_ptr<Watch> watch(const PairView& view, const Agreement& agreement, const OnChanged& changed,
                               const OnGivenUp& gave_up);
  // What one of them has given it up for, if one has: a rank that cannot be reached may have left with a reason that
  // watch() has not brought yet.
  Status given_up(const PairView& view, const Agreement& agreement);
  // What the other side offers.
  Manifest peer_manifest(const PairView& view, const CallLimits& limits);
  // What every rank of this job tells the others about the batch that it is about to register, by rank.
  std::vector<std::string> all_gather(const PairView& view, const std::string& value, const CallLimits& limits);
  // Takes back what this rank has told by all_gather(), now that it has the batch no longer. (A registration that
  // begins again leaves it: a rank that comes back reads it.)
  void retract();
  // Tells the other ranks that this one gave the batch up, and why; they fail with it. What was cancelled is forgotten
  // once this rank registers the batch again, or leaves: it leaves nothing behind for those that come later.
  void report(const Status& status);
  // Whether the registration that was begun last ended with what another rank had reported.
  bool other_failed() const;
  // Takes this rank's records of the batch back.
  void withdraw();

 private:
  // What this rank knows of earlier registrations.
  struct History {
    uint32_t attempt = 0;               // of this rank, the last
    std::map<uint64_t, uint32_t> past;  // by speaker: the newest registration that ended with an earlier attempt
    std::map<uint64_t, uint32_t> read;  // those that the present attempt has read
    int64_t ended = 0;                  // revision of the newest failure that an attempt ended with
    bool failed = false;                // the present attempt ended with another's failure
    bool over = true;                   // it was withdrawn, or another's failure has ended it
    bool asked = false;                 // others to renew theirs
    bool gathered = false;              // something was told by all_gather()
    History next() const;               // that of the next attempt, as it begins
  };
  // A side of the batch as its records are waited for.
  struct Awaited {
    const std::string& job;
    const std::vector<RankRecord>& ranks;
    const History& history;
    std::vector<PeerWatch::Peer> peers() const;
    uint64_t speaker(size_t rank) const;  // that rank of that process, as a number
    std::vector<Rank> missing(const std::function<std::string(Rank)>& key, const StoreView& items) const;
    std::vector<Rank> unregistered(const std::string& records, const StoreView& items) const;
    // Whether `key` holds a record of that rank's that is newer than what an earlier attempt has read.
    bool is_fresh(size_t rank, const std::string& key, const StoreView& items) const;
  };
  // One registration while it is under way.
  struct Attempt {
    Attempt(const BatchExchange& exchange, const PairView& view, History begun, const CallLimits& call_limits);
    History history;
    Registration of;
    Awaited own;
    Awaited peers;
    const CallLimits& limits;
  };
  // What a rank 0 has published, or would have.
  struct Published {
    std::string hash;  // Manifest::hash()
    std::shared_ptr<const Manifest> manifest;
  };
  // What the records of a side say.
  struct Side {
    std::shared_ptr<const Manifest> manifest;
    std::string hash;  // likewise
    bool digest = true;
    bool delta = true;
    std::vector<int64_t> versions;      // by rank
    int64_t newest = 0;                 // of all
    std::vector<Registration> members;  // by rank
  };

  // Those that an agreement is built on, by the keys of what they may say.
  struct Members {
    struct Member {
      std::string name;
      Registration of;
    };
    Seen self;
    std::map<std::string, Member> records = {};
    std::map<std::string, Member> failures = {};  // of the others, as what follows
    std::map<std::string, Member> renewals = {};
  };

  const Identity& identity() const { return rendezvous_.identity(); }
  Members members_of(const PairView& view, const Agreement& agreement) const;
  // At one record, new or changed.
  void look(const Members& members, const std::string& key, const KeyValue& item, const OnChanged& changed,
            const OnGivenUp& gave_up);
  uint64_t speaker() const;  // this rank
  std::string describe() const;
  History begun();
  // Nothing if this rank was asked to renew its registration meanwhile.
  std::optional<Agreement> try_exchange(const PairView& view, const BatchOffer& own, const CallLimits& limits);
  // Puts what this rank offers in the store. Returns what rank 0 does, which the others wait for; nothing as above.
  std::optional<Published> publish(const Attempt& attempt, const BatchOffer& own);
  // That of rank 0: `own` if it is equal. Nothing as above.
  std::optional<Published> await_manifest(const Attempt& attempt, const Published& own);
  Agreement agree(bool sends, const Side& mine, const Side& theirs) const;
  void forget_earlier(const Attempt& attempt, bool sends);  // records that nobody reads any more
  // Asks whoever has kept a registration that an earlier attempt of this rank has read.
  void ask_to_renew(const Attempt& attempt);
  bool is_asked_to_renew(const Awaited& by, const StoreView& items) const;
  bool is_outdated(const Attempt& attempt, const StoreView& items) const;  // somebody asks for another one
  void forget_asking(Duration timeout);
  // Fresh records of all its ranks, unless those of the `other` side give up, or somebody asks for another registration
  // of this rank's.
  StoreView await_side(const Awaited& side, const Awaited* other, const CallLimits& limits);
  // Waits for what is `complete` and, as long as that takes, looks after the ranks of `side` that are missing in it;
  // and after those of the `other` side that have still to register, which are waited for next.
  StoreView await_ranks(const Awaited& side, const Awaited* other, const Store::Predicate& complete,
                        const std::function<std::vector<Rank>(const StoreView&)>& absent,
                        const std::function<std::string(const StoreView&)>& missing, const CallLimits& limits);
  void remember(const Awaited& side, const StoreView& items);  // the present attempt is built on these
  // `known` may be what its rank 0 has published.
  Side judge_side(const Awaited& side, bool sends, const StoreView& items, const Published& known = {}) const;
  static Published read_manifest(const std::string& key, const std::string& value, const Published& known);
  // Of a rank that sends where it should receive, or the other way round.
  [[noreturn]] void fail_direction(const std::string& rank, bool is_own, bool sends) const;
  // --- failures ---
  void throw_if_failed(const Awaited& side, const StoreView& items);
  // The present attempt ends with the failure of `whose` ("trainer/0"): what to throw.
  Status fail_attempt(const std::string& whose, const FailureRecord& record, int64_t revision);
  // Throws if one of the missing ranks has left the pair or died. `failures` calls `ring` when one leaves later. False
  // if the store does not answer.
  struct Missing {
    const Awaited& side;
    std::vector<Rank> ranks;
  };
  bool throw_if_gone(std::span<const Missing> missing, Deadline deadline, std::unique_ptr<Watch>& failures,
                     const std::function<void()>& ring) const;
  // Likewise if one is stopped.
  void throw_if_stopped(const PeerWatch& processes, const std::vector<Rank>& missing) const;

  Rendezvous& rendezvous_;
  Store& store_;
  const std::string pair_;
  const std::string peer_job_;
  const std::string batch_;
  const std::string records_;  // a meeting_prefix()
  mutable Mutex mutex_;
  History history_ GUARDED_BY(mutex_);
};

// All of a rank's, made as they are asked for. Thread-safe.
class BatchExchanges {
 public:
  explicit BatchExchanges(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}  // which outlives it

  BatchExchange& of(const PairView& view, const std::string& batch);

 private:
  Rendezvous& rendezvous_;
  Mutex mutex_;
  std::map<std::string, BatchExchange> by_meeting_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
