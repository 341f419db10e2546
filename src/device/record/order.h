// In which order the records of all ranks happen, as far as their edges say: vector clocks over hosts and streams.
//
// Every host and every stream is an actor. Its clock holds, for each actor, how many records of that actor happen
// before its next one; its own number of records so far is its *epoch*. So a record (actor a, epoch e) happens before
// whatever comes next at a clock c if and only if c[a] >= e. Edges are: the order of an actor's records; from the host
// to what it enqueues; from an event to those who wait for it; from the first write of a word that is at least the
// value to who waits for that value; from each rank's entry into a collective to every rank's exit.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/record/rank_log.h"
#include "device/record/record.h"

namespace tessera::device {

using VectorClock = std::span<const uint32_t>;  // by actor

// A record in the order, by its actor.
struct OrderPoint {
  uint32_t actor = 0;
  uint32_t epoch = 0;

  bool before(VectorClock clock) const { return clock[actor] >= epoch; }
};

struct OrderActor {
  int rank = 0;
  uint32_t number = 0;  // in its rank; 0 is the host
  std::string_view name;
  uint32_t host = 0;  // the actor of its rank's host

  // "rank 1's host", "stream gather of rank 1"
  std::string to_string() const;
};

// Thread-compatible. The logs must outlive it.
class ScheduleOrder {
 public:
  static constexpr size_t kMostActors = 4096;
  static constexpr size_t kMostFaults = 100;

  // Throws kMismatch if the logs are not those of all ranks of one run.
  explicit ScheduleOrder(std::span<const RankLog> logs);

  // Goes through all records, each after those that happen before it, and calls `visit` for those that access memory,
  // with the clock that they have. Once.
  using Visit = std::function<void(const Record& record, OrderPoint point, VectorClock clock)>;
  void run(const Visit& visit);

  // What contradicts itself or has no counterpart, a line each; at most kMostFaults.
  const std::vector<std::string>& faults() const { return faults_; }
  // Of streams whose next operation had not begun when the recording ended: no fault.
  const std::vector<std::string>& unfinished() const { return unfinished_; }
  // Records that run() could not come to, since they wait for what the logs do not hold.
  size_t unreached() const { return unreached_; }

  const OrderActor& actor(uint32_t index) const { return states_[index].actor; }
  // The first event that `from.actor` records at or after that point; null if there is none.
  const Record* event_after(OrderPoint from) const;
  // The first write of a word of rank `from`'s that happens after that point, or is of it; null if there is none.
  struct WordWritten {
    const Record* record;
    WordEdge word;
    uint32_t actor;
  };
  const WordWritten* word_after(OrderPoint from) const;

 private:
  using Position = uint32_t;  // in the records of a log

  // A point with the clock it had.
  struct Stamp {
    OrderPoint point;
    uint32_t snapshot = 0;
  };
  struct Pending {
    Position position;
    Stamp host;  // when it was enqueued
  };
  struct Signal {
    Stamp stamp;
    WordWritten written;  // of an event without a word
  };
  struct State {
    OrderActor actor;
    std::vector<uint32_t> clock;
    uint32_t changes = 0;       // of the clock but for its own epoch
    uint32_t host_changes = 0;  // those of the host's clock that have been joined
    uint32_t snapshot = 0;
    uint32_t snapshot_changes = UINT32_MAX;            // when that was taken
    std::deque<Pending> queue;                         // of a stream
    std::vector<std::pair<uint64_t, Position>> waits;  // of its operations, by operation
    size_t next_wait = 0;
    std::vector<std::pair<uint64_t, Position>> accesses;  // of its operations that are not in their records
    size_t next_access = 0;
    uint64_t last_operation = 0;
    size_t words_seen = 0;  // of the operation in front
    std::vector<Signal> events, words;
  };
  struct Word {
    std::vector<std::pair<uint64_t, Stamp>> writes;  // by value
    std::vector<uint32_t> waiters;
  };
  struct Meeting {  // of the ranks of a group, in one collective
    const Record* first = nullptr;
    std::vector<Stamp> arrived;
  };
  struct EventState {
    bool recorded = false;
    Stamp stamp;
    std::vector<uint32_t> waiters;
  };
  using RankKey = std::pair<int, uint64_t>;  // a rank, and a word or an event of it
  struct KeyHash {
    size_t operator()(const RankKey& key) const {
      return std::hash<uint64_t>{}(key.second * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(key.first));
    }
  };
  using MeetingKey = std::pair<std::string_view, uint64_t>;  // group, number

  // What the logs hold, whether it has been reached or not.
  struct Held {
    std::set<RankKey> events;
    std::map<RankKey, uint64_t> words;  // the highest value
    std::set<std::pair<MeetingKey, int>> meetings;
  };

  void add_log(const RankLog& log, const LogHead& first);
  void find_streams(const RankLog& log);
  // What belongs to operations and stands behind them.
  void find_waits(const RankLog& log);
  // The actor of a record; kNone, with a fault, if the log does not name it.
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t actor_of(const Record& record);
  const Record& at(uint32_t actor, Position position) const {
    return logs_[static_cast<size_t>(states_[actor].actor.rank)]->records()[position];
  }

  void advance(uint32_t actor);
  void read_on(uint32_t host);
  void enqueue(uint32_t stream, Position position);
  // Whether it happened. If not the actor waits, and advances once that may have changed.
  bool happen(uint32_t actor, const Record& record);
  bool happen_operation(uint32_t actor, const Record& record);
  bool wait_event(uint32_t actor, const Record& record);
  // Of the words that an actor waits for in a row; `first` is the number of the record's first one among them.
  bool wait_words(uint32_t actor, const Record& record, size_t first);
  bool meet(uint32_t actor, const Record& record);
  void write_words(uint32_t actor, const Record& record);
  void record_event(uint32_t actor, const Record& record);
  // How many waits of an operation the log has.
  size_t waits_of(State& state, const Record& record);
  void visit_accesses(uint32_t actor, const Record& operation);

  void tick(uint32_t actor) { ++states_[actor].clock[actor]; }
  Stamp stamp(uint32_t actor);
  void join(uint32_t actor, const Stamp& stamp);
  void join_host(uint32_t stream);
  void wake(std::vector<uint32_t>& waiters);
  void add_fault(std::string text);

  void explain_rest();
  Held all_held() const;
  // Adds a fault, or to unfinished(), if what the actor waits for is not in the logs at all.
  bool explain(uint32_t actor, const Record& record, const Held& held);
  bool explain_words(uint32_t actor, const Record& record, const Held& held);
  bool explain_meeting(const Record& record, const Held& held);

  std::vector<const RankLog*> logs_;            // by rank
  std::vector<State> states_;                   // hosts first, by rank
  std::vector<std::vector<uint32_t>> streams_;  // the actor, by rank and number
  std::vector<uint64_t> first_events_;          // by rank: the lowest that its log records
  std::vector<Position> read_;                  // by rank: how many records have happened or are in queues
  std::vector<uint32_t> snapshots_;
  std::deque<uint32_t> ready_;
  std::unordered_map<RankKey, EventState, KeyHash> events_;
  std::unordered_map<RankKey, Word, KeyHash> words_;
  std::map<MeetingKey, Meeting> meetings_;
  std::vector<std::string> faults_;
  std::vector<std::string> unfinished_;
  size_t unreached_ = 0;
  const Visit* visit_ = nullptr;
};

}  // namespace tessera::device
