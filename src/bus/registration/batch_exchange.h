// How a rank registers one batch with one other job: what each rank offers, what all agree on, and failures. Exchanges
// over the store, which block.
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
#include "codec/simd/digest_sample.h"
#include "peer/call_limits.h"
#include "peer/peer_watch.h"
#include "tessera/store.h"

namespace tessera::bus {

// What a rank registers.
struct BatchOffer {
  bool sends = false;
  DigestMode digest = {};
  bool delta = false;
  int64_t version = 0;  // sent last, or held now
  int64_t newest = 0;   // the newest that was offered, at least `version`
  std::shared_ptr<const Manifest> manifest;
};

// What both sides have registered for one batch.
struct Agreement {
  Match match;
  std::string session;         // equal on all ranks of both sides that read the same registrations
  bool digest = true;          // unless somebody switched it off
  SampleSeed sample = {};      // set if somebody asked for sampled digests, and there are no deltas
  bool delta = false;          // if all asked for it
  int64_t sent_version = 0;    // the last that any sending rank knows of
  int64_t newest_version = 0;  // the newest that one has offered, sent or not
  int64_t floor = 0;           // all receiving ranks hold versions up to this one
  // The registrations that it is built on: own ranks, then the peer's.
  std::vector<Registration> members;
  TimePoint began = {};  // of this rank's registration
};

// Thread-safe; one registration at a time. It lives as long as the rank: an id may be reused at any time, and a new
// registration must not be built on what an earlier one left. Views must be of the pair and the peer job that it was
// made for. Blocking calls throw kDeadlineExceeded at the deadline of their limits, and kCancelled once their `stop` is
// requested; the message names who is missing.
class BatchExchange {
 public:
  BatchExchange(Rendezvous& rendezvous, std::string pair, std::string peer_job, std::string batch);
  BatchExchange(const BatchExchange&) = delete;
  BatchExchange& operator=(const BatchExchange&) = delete;

  // Begins a registration, unless one has begun and was not withdrawn: reports from now on are about it. exchange(),
  // peer_manifest() and all_gather() call it themselves.
  void begin();
  // Publishes what this rank registers, and reads what all others have registered.
  Agreement exchange(const PairView& view, const BatchOffer& own, const CallLimits& limits);
  // Calls `changed`, on the store client's thread, when a rank that `agreement` is built on registers again, or asks
  // this rank to; for every rank if events were missed. Calls `gave_up` when one of them gives up what `agreement` is
  // built on.
  using OnChanged = std::function<void(const std::string& rank)>;
  using OnGivenUp = std::function<void(const Status& why)>;
  std::unique_ptr<Watch> watch(const PairView& view, const Agreement& agreement, const OnChanged& changed,
                               const OnGivenUp& gave_up);
  // The reason if one of them has given up: a rank that cannot be reached may have left with a reason that watch() has
  // not reported yet.
  Status given_up(const PairView& view, const Agreement& agreement);
  // What the other side offers.
  Manifest peer_manifest(const PairView& view, const CallLimits& limits);
  // Publishes a value for the other ranks of this job, before the batch is registered, and returns theirs, by rank.
  std::vector<std::string> all_gather(const PairView& view, const std::string& value, const CallLimits& limits);
  // Removes the value that this rank published with all_gather(), once it no longer has the batch. (A registration that
  // begins again keeps it, since a rank that comes back reads it.)
  void retract();
  // Tells the other ranks that this one gave the batch up, and why; they fail with that reason. A cancellation is
  // forgotten once this rank registers the batch again or leaves: ranks that come later do not see it.
  void report(const Status& status);
  // Whether the last registration ended with a failure that another rank had reported.
  bool other_failed() const;
  // Removes this rank's records of the batch.
  void withdraw();

 private:
  // What this rank knows of earlier registrations.
  struct History {
    uint32_t attempt = 0;               // of this rank, the last one
    std::map<uint64_t, uint32_t> past;  // by speaker: the newest registration that an earlier attempt used
    std::map<uint64_t, uint32_t> read;  // those that the current attempt has read
    int64_t ended = 0;                  // revision of the newest failure that ended an attempt
    bool failed = false;                // another rank's failure ended the current attempt
    bool gone = false;                  // or the end of another rank's process did
    bool over = true;                   // it was withdrawn, or another rank's failure has ended it
    bool asked = false;                 // this rank has asked others to renew theirs
    bool gathered = false;              // all_gather() has published a value
    History next() const;               // at the start of the next attempt
  };
  // A side of the batch whose records are awaited.
  struct Awaited {
    const std::string& job;
    const std::vector<RankRecord>& ranks;
    const History& history;
    std::vector<PeerWatch::Peer> peers() const;
    uint64_t speaker(size_t rank) const;  // speaker_of() that rank's process
    std::vector<Rank> missing(const std::function<std::string(Rank)>& key, const StoreView& items) const;
    std::vector<Rank> unregistered(const std::string& records, const StoreView& items) const;
    // The `absent` ranks that hold the others up: not those that have published a value with all_gather(), and wait.
    std::vector<Rank> late(std::vector<Rank> absent, const std::string& records, const StoreView& items) const;
    // Whether `key` holds a record of that rank that is newer than what an earlier attempt has read.
    bool is_fresh(size_t rank, const std::string& key, const StoreView& items) const;
  };
  // One registration in progress.
  struct Attempt {
    Attempt(const BatchExchange& exchange, const PairView& view, History begun, const CallLimits& call_limits);
    History history;
    Registration of;
    Awaited own;
    Awaited peers;
    const CallLimits& limits;
  };
  // What rank 0 has published, or would publish.
  struct Published {
    std::string hash;  // Manifest::hash()
    std::shared_ptr<const Manifest> manifest;
  };
  // The contents of a side's records.
  struct Side {
    std::shared_ptr<const Manifest> manifest;
    std::string hash;  // Manifest::hash()
    DigestMode digest = {};
    bool delta = true;
    std::vector<int64_t> versions;      // by rank
    int64_t newest = 0;                 // of all ranks
    std::vector<Registration> members;  // by rank
  };

  // The ranks that an agreement is built on, by the keys that they may write.
  struct Members {
    struct Member {
      std::string name;
      Registration of;
    };
    Seen self;
    std::map<std::string, Member> records = {};
    std::map<std::string, Member> failures = {};  // of the other ranks, like the rest
    std::map<std::string, Member> renewals = {};
  };

  const Identity& identity() const { return rendezvous_.identity(); }
  Members members_of(const PairView& view, const Agreement& agreement) const;
  // Handles one record that is new or has changed.
  void look(const Members& members, const std::string& key, const KeyValue& item, const OnChanged& changed,
            const OnGivenUp& gave_up);
  uint64_t speaker() const;  // of this rank
  std::string describe() const;
  History begun();
  // Nothing if this rank was asked to renew its registration in the meantime.
  std::optional<Agreement> try_exchange(const PairView& view, const BatchOffer& own, const CallLimits& limits);
  // Publishes what this rank offers. Returns what rank 0 publishes, which the others wait for; nothing as above.
  std::optional<Published> publish(const Attempt& attempt, const BatchOffer& own);
  // Returns what rank 0 publishes: `own` if it is equal. Nothing as above.
  std::optional<Published> await_manifest(const Attempt& attempt, const Published& own);
  Agreement agree(bool sends, const Side& mine, const Side& theirs) const;
  void forget_earlier(const Attempt& attempt, bool sends);  // records that nobody reads any more
  // Asks ranks to renew registrations that an earlier attempt of this rank has read.
  void ask_to_renew(const Attempt& attempt);
  bool is_asked_to_renew(const Awaited& by, const StoreView& items) const;
  bool is_outdated(const Attempt& attempt, const StoreView& items) const;  // somebody asks for a new registration
  void forget_asking(Duration timeout);
  // Fresh records of all its ranks, unless those of the `other` side give up, or somebody asks this rank to register
  // again.
  StoreView await_side(const Awaited& side, const Awaited* other, const CallLimits& limits);
  // Waits until the records are `complete`. Meanwhile it checks on the ranks of `side` that are missing, and on those
  // of the `other` side that have yet to register, which are waited for next.
  StoreView await_ranks(const Awaited& side, const Awaited* other, const Store::Predicate& complete,
                        const std::function<std::vector<Rank>(const StoreView&)>& absent,
                        const std::function<std::string(const StoreView&)>& missing, const CallLimits& limits);
  void remember(const Awaited& side, const StoreView& items);  // the current attempt is built on these
  // `known` is what the side's rank 0 has published, if that was read already.
  Side judge_side(const Awaited& side, bool sends, const StoreView& items, const Published& known = {}) const;
  static Published read_manifest(const std::string& key, const std::string& value, const Published& known);
  // For a rank that sends where it should receive, or the other way round.
  [[noreturn]] void fail_direction(const std::string& rank, bool is_own, bool sends) const;
  // --- failures ---
  void throw_if_failed(const Awaited& side, const StoreView& items);
  // Of both sides: an own rank that has heard of a failure of the other job comes no more.
  void throw_if_failed(const Attempt& attempt, const StoreView& items) {
    throw_if_failed(attempt.own, items);
    throw_if_failed(attempt.peers, items);
  }
  bool is_others_deadline(const std::string& job, const FailureRecord& record) const;
  // Ends the current attempt with the failure of `whose` ("trainer/0"); returns the error to throw.
  Status fail_attempt(const std::string& whose, const FailureRecord& record, int64_t revision);
  // Throws if one of the missing ranks has left the pair or died. `failures` calls `ring` if one leaves later. False if
  // the store does not answer.
  struct Missing {
    const Awaited& side;
    std::vector<Rank> ranks;
  };
  bool throw_if_gone(std::span<const Missing> missing, Deadline deadline, std::unique_ptr<Watch>& failures,
                     const std::function<void()>& ring);
  void note_gone();
  // Throws likewise if one is stopped.
  void throw_if_stopped(const PeerWatch& processes, const std::vector<Rank>& missing) const;

  Rendezvous& rendezvous_;
  Store& store_;
  const std::string pair_;
  const std::string peer_job_;
  const std::string batch_;
  const std::string records_;  // a meeting_prefix()
  mutable Mutex mutex_;
  History history_ GUARDED_BY(mutex_);
  TimePoint began_ GUARDED_BY(mutex_);  // the current attempt
};

// All exchanges of a rank, made on demand. Thread-safe.
class BatchExchanges {
 public:
  explicit BatchExchanges(Rendezvous& rendezvous) : rendezvous_(rendezvous) {}  // outlives this

  BatchExchange& of(const PairView& view, const std::string& batch);

 private:
  Rendezvous& rendezvous_;
  Mutex mutex_;
  std::map<std::string, BatchExchange> by_meeting_ GUARDED_BY(mutex_);
};

}  // namespace tessera::bus
