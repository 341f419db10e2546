// The store's state machine: keys, revisions, leases and history, without sockets, files, threads or a clock. (Callers
// pass the time as a TimePoint, which is monotonic: a jump of the wall clock ends no lease.)
//
// Thread-compatible. Arguments have passed limits.h; what depends on the state is checked here, before any change.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "tessera/store.h"

namespace tessera::store {

using Record = std::shared_ptr<const KeyValue>;

struct Event {
  StoreEvent::Type type;
  Record kv;
  int64_t revision() const { return kv->mod_revision; }
};

// The changes of one call: all of them happen, or none.
struct Change {
  int64_t revision = 0;             // the store's, after the change
  std::span<const Event> events{};  // puts and deletions
  LeaseId lease = kNoLease;         // granted for `ttl`, or ended if `ttl` is zero
  Duration ttl{};
};

// A store that continues another one starts at a multiple of this: no store makes so many changes.
inline constexpr int64_t kRevisionsPerStore = int64_t{1} << 32;

class State {
 public:
  struct Limits {
    size_t history_events = 4096;
    size_t history_bytes = size_t{16} << 20;  // keys and values
  };
  // Gets the events of every change, in one call for each revision, before the call that made it returns.
  using Sink = std::function<void(std::span<const Event>)>;

  // Saves every change outside before it is made here. If it throws, the change is not made and the call throws. A
  // lease ends nevertheless, since its owner may be dead: after a restart it is back, and ends again.
  using Keeper = std::function<void(const Change&)>;

  explicit State(Limits limits, Sink sink = nullptr) : limits_(limits), sink_(std::move(sink)) {}

  void set_keeper(Keeper keeper) { keeper_ = std::move(keeper); }

  int64_t revision() const { return revision_; }
  // Events up to and including this revision are forgotten: a watch must begin after it.
  int64_t compacted() const { return compacted_; }

  Record find(std::string_view key) const;
  std::vector<Record> find_prefix(std::string_view prefix) const;

  struct Outcome {
    bool succeeded = false;
    std::vector<Record> stored{};   // one for each put, in order
    std::vector<Record> current{};  // if it failed: the compared keys that exist
  };
  // Throws kNotFound for an unknown lease, kResourceExhausted for a full store.
  Outcome transact(const StoreTransaction& transaction);
  // Returns the number of keys deleted.
  size_t erase(std::string_view key);
  size_t erase_prefix(std::string_view prefix);

  // Grants a lease, or renews it with another ttl.
  void grant(LeaseId lease, Duration ttl, TimePoint now);
  bool keep_alive(LeaseId lease, TimePoint now);  // false: there is no such lease
  void revoke(LeaseId lease);                     // deletes its keys; no effect if it is unknown
  void expire(TimePoint now);
  std::optional<TimePoint> next_expiry() const;

  // Restores a key that a client publishes again, as it was in an earlier store. It is ignored if the key has been
  // written here, or published again with a later mod_revision. `silent`: the key keeps its revisions and causes no
  // event, for a store that has not answered anybody yet; otherwise, or if the revisions are impossible, it is a new
  // change. An unknown lease makes it fail.
  void restore(const KeyValue& kv, bool silent);
  // Continues a store that had reached `revision`: the next revisions are above the next multiple of
  // kRevisionsPerStore. Forgets all history.
  void raise_revision(int64_t revision);

  // The events under `prefix` from revision `from` on; `from` > compacted().
  std::vector<Event> events_from(int64_t from, std::string_view prefix) const;

 private:
  struct Lease {
    Duration ttl;
    TimePoint expiry;
    std::set<std::string, std::less<>> keys;
  };

  void check_room(const StoreTransaction& transaction) const;
  Event deletion_of(const KeyValue& kv) const;
  void keep(const Change& change) const;
  void keep_if_possible(const Change& change) const;
  void commit(const std::vector<Event>& events);
  void apply(const Event& event);
  void take_out(std::string_view key);

  const Limits limits_;
  const Sink sink_;
  Keeper keeper_;
  int64_t revision_ = 0;
  int64_t compacted_ = 0;
  std::map<std::string, Record, std::less<>> keys_;
  size_t stored_bytes_ = 0;
  std::unordered_map<LeaseId, Lease> leases_;
  std::set<std::pair<TimePoint, LeaseId>> expiries_;
  std::deque<Event> history_;
  size_t history_bytes_ = 0;
  std::unordered_map<std::string, int64_t> restored_;  // keys as published again, with the mod_revision given
};

}  // namespace tessera::store
