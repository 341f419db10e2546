// Logs written by hand, for tests: of all ranks of a run, as their recorders would write them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string_view>
#include <vector>

#include "device/record/rank_log.h"
#include "device/record/record.h"

namespace tessera::device {

// Bytes [begin, end) of the one region that each rank has, which all ranks map.
inline RecordedAccess reads(int owner, uint64_t begin, uint64_t end, uint64_t version = 0) {
  return {.region = {.owner = owner, .number = 1}, .offset = begin, .bytes = end - begin, .version = version};
}
inline RecordedAccess writes(int owner, uint64_t begin, uint64_t end, uint64_t version = 0) {
  RecordedAccess access = reads(owner, begin, end, version);
  access.write = true;
  return access;
}

class HandLogs {
 public:
  using Accesses = std::initializer_list<RecordedAccess>;
  using Words = std::initializer_list<WordEdge>;
  struct Actor {
    int rank;
    uint32_t number;
  };
  static constexpr uint64_t kRegionBytes = 1 << 20;

  explicit HandLogs(int ranks) : events_(static_cast<size_t>(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      logs_.emplace_back(LogHead{.run = 7, .rank = rank, .ranks = ranks});
      for (int owner = 0; owner < ranks; ++owner)
        add({rank, 0}, {.kind = RecordKind::kRegion,
                        .region = {.owner = owner, .number = 1},
                        .bytes = kRegionBytes,
                        .name = "heap"});
    }
  }

  std::vector<RankLog>& all() { return logs_; }
  RankLog& operator[](int rank) { return logs_[static_cast<size_t>(rank)]; }

  static Actor host(int rank) { return {rank, 0}; }
  Actor stream(int rank, std::string_view name) {
    const Actor actor{rank, ++streams_};
    add(actor, {.kind = RecordKind::kActor, .name = name});
    return actor;
  }

  // Returns the operation's number. `after`: the words of one condition that it waits for; they are seen at once.
  uint64_t operation(Actor actor, std::string_view name, Accesses accesses, Words after = {}, Words sets = {}) {
    const uint64_t number = enqueue(actor, name, accesses, after.size() > 0 ? 1 : 0, sets);
    if (after.size() > 0) begins(actor, number, after);
    return number;
  }
  // The same in two parts: between the two the host goes on.
  uint64_t enqueue(Actor actor, std::string_view name, Accesses accesses, uint32_t waits = 0, Words sets = {}) {
    const uint64_t number = actor.number == 0 ? 0 : ++operations_[actor.number];
    add(actor, {.kind = RecordKind::kOperation,
                .operation = number,
                .waits = waits,
                .name = name,
                .accesses = {accesses.begin(), accesses.size()},
                .words = {sets.begin(), sets.size()}});
    return number;
  }
  void begins(Actor actor, uint64_t operation, Words seen) {
    add(actor, {.kind = RecordKind::kWordWait, .operation = operation, .words = {seen.begin(), seen.size()}});
  }
  // What it turns out to access.
  void accesses(Actor actor, uint64_t operation, std::string_view name, Accesses more) {
    add(actor, {.kind = RecordKind::kOperationAccess,
                .operation = operation,
                .name = name,
                .accesses = {more.begin(), more.size()}});
  }
  void access(int rank, std::string_view name, Accesses accesses) {
    add({rank, 0}, {.kind = RecordKind::kHostAccess, .name = name, .accesses = {accesses.begin(), accesses.size()}});
  }
  uint64_t record(Actor actor) {
    const uint64_t event = ++events_[static_cast<size_t>(actor.rank)];
    add(actor, {.kind = RecordKind::kEventRecord, .event = event});
    return event;
  }
  void wait(Actor actor, uint64_t event) { add(actor, {.kind = RecordKind::kEventWait, .event = event}); }
  void set(int rank, uint64_t word, uint64_t value) {
    const WordEdge edge{.rank = rank, .word = word, .value = value};
    add({rank, 0}, {.kind = RecordKind::kWordWrite, .words = {&edge, 1}});
  }
  void see(int rank, WordEdge seen) { add({rank, 0}, {.kind = RecordKind::kWordWait, .words = {&seen, 1}}); }
  void collective(int rank, uint64_t number, std::string_view name = "barrier", std::string_view group = "etp",
                  uint32_t ranks = 0) {
    add({rank, 0}, {.kind = RecordKind::kCollective,
                    .number = number,
                    .ranks = ranks == 0 ? static_cast<uint32_t>(logs_.size()) : ranks,
                    .name = name,
                    .subject = group});
  }
  void collective_of_all(uint64_t number) {
    for (int rank = 0; rank < static_cast<int>(logs_.size()); ++rank) collective(rank, number);
  }
  void ran(Actor actor, uint64_t operation, int64_t begin, int64_t end) {
    add(actor, {.kind = RecordKind::kRan, .operation = operation, .begin = begin, .end = end});
  }
  void add(Actor actor, Record record) {
    record.actor = actor.number;
    logs_[static_cast<size_t>(actor.rank)].append(record);
  }

 private:
  std::vector<RankLog> logs_;
  uint32_t streams_ = 0;
  std::map<uint32_t, uint64_t> operations_;  // of each stream
  std::vector<uint64_t> events_;             // of each rank
};

}  // namespace tessera::device
