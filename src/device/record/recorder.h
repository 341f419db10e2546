// Records what the host and the streams of a rank do, for the checker of schedules and for traces.
//
// Off, a call costs one branch. On, it copies its arguments into a block that was allocated before; a full block goes
// to the sink. Names are literals, of which only the address is kept, unless a call takes a string_view.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/ticks.h"
#include "device/access.h"
#include "device/operation.h"
#include "device/record/record.h"

namespace tessera::device {

// Takes a full block and returns one to go on with: the same, after it was read, or none, then another is allocated.
// Called with the recorder locked, so it must not call the recorder. What it throws ends the recording:
// Recorder::stop() throws it.
using RecordSink = std::function<std::unique_ptr<RecordBlock>(std::unique_ptr<RecordBlock>)>;

// Thread-safe. The calls of a rank's host come in the order in which they take effect.
class Recorder {
 public:
  explicit Recorder(int rank = 0) : rank_(rank) {}
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  int rank() const { return rank_; }
  // The rank that records and edges name: that of the group all of whose logs are checked together. Before start().
  void set_rank(int rank);

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // From now on until stop(). What has been added before is recorded first. Throws Error(kAlreadyExists) if it is on.
  void start(RecordSink sink);
  // Gives the sink what is left, even if that is an empty block, and forgets it. Throws what the sink threw. Does
  // nothing if it is off.
  void stop();

  // A number for a stream, which is not used again.
  uint32_t add_actor(std::string_view name);
  // A number for an event.
  uint64_t next_event() { return events_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // [local, local + bytes) of this process is the beginning of region `id`. Other regions that it overlaps are dropped:
  // their memory is gone. The same region may be added again, and at several addresses. Known until dropped by its
  // address, whether recording or not.
  void add_region(const void* local, size_t bytes, RegionId id, std::string_view label);
  void drop_region(const void* local);

  // `waits`: how often word_wait() will name it.
  void operation(uint32_t actor, uint64_t number, const char* name, std::string_view subject,
                 std::span<const Access> accesses, std::span<const WordEdge> writes, size_t waits = 0) {
    if (on())
      put(RecordKind::kOperation, {}, subject, accesses, writes, [&](Entry& entry) {
        entry.actor = actor;
        entry.number = number;
        entry.name = name;
        entry.count = static_cast<uint32_t>(waits);
      });
  }
  // Times are ticks().
  void ran(uint32_t actor, uint64_t operation, uint64_t begin, uint64_t end) {
    if (on())
      put(RecordKind::kRan, {}, {}, {}, {}, [&](Entry& entry) {
        entry.actor = actor;
        entry.number = operation;
        entry.begin = begin;
        entry.end = end;
      });
  }
  // An operation of the host that is over, with what it waited for. `begin` 0: it failed in a wait; `end` 0: it failed
  // later.
  void ran_here(const Operation& operation, std::span<const WaitNotes> waits, uint64_t begin, uint64_t end);
  void host_access(const char* name, std::string_view subject, std::span<const Access> accesses) {
    if (on()) put(RecordKind::kHostAccess, {}, subject, accesses, {}, [&](Entry& entry) { entry.name = name; });
  }
  void event_record(uint32_t actor, uint64_t event) { put_event(RecordKind::kEventRecord, actor, event); }
  // Actor 0: the host waits.
  void event_wait(uint32_t actor, uint64_t event) { put_event(RecordKind::kEventWait, actor, event); }
  void word_write(std::span<const WordEdge> words, std::string_view subject = {}) {
    if (on()) put(RecordKind::kWordWrite, {}, subject, {}, words, [](Entry&) {});
  }
  // Operation 0: the host itself has waited. Else in front of that operation of the actor.
  void word_wait(uint32_t actor, uint64_t operation, std::span<const WordEdge> words, std::string_view subject = {}) {
    if (on())
      put(RecordKind::kWordWait, {}, subject, {}, words, [&](Entry& entry) {
        entry.actor = actor;
        entry.number = operation;
      });
  }
  // Before the waits of that operation.
  void operation_access(uint32_t actor, uint64_t operation, const char* name, std::string_view subject,
                        std::span<const Access> accesses) {
    if (on() && !accesses.empty())
      put(RecordKind::kOperationAccess, {}, subject, accesses, {}, [&](Entry& entry) {
        entry.actor = actor;
        entry.number = operation;
        entry.name = name;
      });
  }
  void collective(std::string_view group, uint32_t ranks, uint64_t number, std::string_view what) {
    if (on())
      put(RecordKind::kCollective, what, group, {}, {}, [&](Entry& entry) {
        entry.number = number;
        entry.count = ranks;
      });
  }

 private:
  using Entry = RecordBlock::Entry;
  struct LocalRegion {
    uintptr_t begin;
    size_t bytes;
    RegionId id;
    std::string label;
  };

  // `fill` writes what is left of the entry.
  template <typename Fill>
  void put(RecordKind kind, std::string_view name, std::string_view subject, std::span<const Access> accesses,
           std::span<const WordEdge> words, const Fill& fill) {
    const MutexLock lock(mutex_);
    if (!on()) return;
    if (Entry* const entry = add(kind, name, subject, accesses, words)) fill(*entry);
  }
  void put_event(RecordKind kind, uint32_t actor, uint64_t event) {
    if (on())
      put(kind, {}, {}, {}, {}, [&](Entry& entry) {
        entry.actor = actor;
        entry.number = event;
      });
  }
  // Null once the sink has failed.
  Entry* add(RecordKind kind, std::string_view name, std::string_view subject, std::span<const Access> accesses = {},
             std::span<const WordEdge> words = {}) REQUIRES(mutex_);
  void put_actor(uint32_t actor) REQUIRES(mutex_);
  void put_region(const LocalRegion& region) REQUIRES(mutex_);
  void drop_region_locked(uintptr_t begin) REQUIRES(mutex_);
  void begin_block() REQUIRES(mutex_);
  void pass_on() REQUIRES(mutex_);
  void place(const Access& access, RecordedAccess& recorded) const REQUIRES(mutex_);

  std::atomic<bool> on_{false};
  std::atomic<uint64_t> events_{0};
  mutable Mutex mutex_;
  int rank_;  // changed only while nothing is recorded
  RecordSink sink_ GUARDED_BY(mutex_);
  std::unique_ptr<RecordBlock> block_ GUARDED_BY(mutex_);
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  uint64_t sequence_ GUARDED_BY(mutex_) = 0;
  TickMark started_ GUARDED_BY(mutex_);
  std::vector<std::string> actors_ GUARDED_BY(mutex_);   // actor n is actors_[n - 1]
  std::vector<LocalRegion> regions_ GUARDED_BY(mutex_);  // by address
};

}  // namespace tessera::device
