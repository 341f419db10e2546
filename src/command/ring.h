// One direction of a command queue: a bounded ring of small records in memory that two processes share, with one
// producer and one consumer (docs/formats/command-ring.md).
//
// Trust. Each end keeps its own count. What the other wrote is loaded once and checked against that count; a record is
// copied first and its length checked in the copy. So a peer that scribbles over the memory can only corrupt records,
// break the ring, or keep an end asleep until its deadline.
//
// Sleep. An idle end spins briefly, if it was configured to, then sets `asleep` and sleeps on that word. The other end
// makes a wake-up call only if it finds `asleep` set, and clears it, so that one sleep costs at most one call.
//
// Memory order. (1) A record is visible before the count that announces it, and its slot is read before the count that
// frees it: release and acquire on the counts. (2) One end publishes and then checks `asleep`; the other sets `asleep`
// and then checks whether something was published. At least one must see the other: each does a store and then a load
// of another word, and only seq_cst on all four keeps them in order. The same holds for `closed` in place of the count.
// (3) `closed` is loaded before the count, so that records pushed before it are still popped. (4) The head of a record
// is stored with release, so that an observer that sees a word of a later record also sees that the slot was freed
// before. Payload is relaxed; it is atomic, word by word, because a misbehaving peer may write at any time.
//
// Sync provides atomics, sleep and time: ProcessSync here, and a model in the tests that runs this code through its
// interleavings.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/futex.h"

namespace tessera {

inline constexpr size_t kRecordBytes = 1024;  // of one slot
inline constexpr size_t kRecordHeadBytes = 32;
inline constexpr size_t kMaxRecordPayload = kRecordBytes - kRecordHeadBytes;

struct RecordHead {
  uint64_t incarnation = 0;  // of the client: the nonce of its Incarnation (base/process.h)
  uint64_t id = 0;           // of the command, unique in that incarnation
  uint16_t type = 0;
};

// A popped record: a copy whose length, and only that, is known to be in bounds.
struct Record {
  RecordHead head;
  uint16_t bytes = 0;
  std::array<std::byte, kMaxRecordPayload> data;
  std::span<const std::byte> payload() const { return std::span(data).first(bytes); }
};

// A record that waits to be popped, as an observer sees it.
struct PendingRecord {
  RecordHead head;
  uint16_t bytes = 0;
  Duration age{};
};

enum class RingState {
  kReady,        // a record was pushed or popped
  kNotYet,       // full or empty, at the time or at the deadline
  kInterrupted,  // RingConsumer::nudge()
  kEnded,        // either end has closed, and nothing is left to pop
  kBroken,       // the other end wrote something impossible
};

struct ProcessSync {
  template <typename T>
  using Atomic = std::atomic<T>;
  using Word = std::atomic<uint32_t>;  // a word to sleep on
  static void wait(const Word& word, uint32_t expected, const Deadline& deadline) {
    futex_wait(word, expected, deadline);
  }
  static void wake(const Word& word) { futex_wake(word); }
  static TimePoint now() { return Clock::steady().now(); }
  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }
};

// The words that one end writes for the other. `asleep` is set only by that end and cleared by both.
template <typename Sync>
struct RingSide {
  alignas(64) typename Sync::template Atomic<uint64_t> count{0};  // records pushed or popped so far
  typename Sync::template Atomic<uint32_t> closed{0};
  alignas(64) typename Sync::Word asleep{0};
};

template <typename Sync>
struct RingHeader {
  RingSide<Sync> producer;
  RingSide<Sync> consumer;
};

template <typename Sync>
struct RingSlot {
  static constexpr size_t kHeadWords = kRecordHeadBytes / sizeof(uint64_t);
  std::array<typename Sync::template Atomic<uint64_t>, kRecordBytes / sizeof(uint64_t)> words{};
};

// A ring in memory that outlives it. A value; any thread may call size() and pending(), which do not disturb the ends.
template <typename Sync>
struct BasicRing {
  RingHeader<Sync>* header = nullptr;
  std::span<RingSlot<Sync>> slots;

  size_t capacity() const { return slots.size(); }
  RingSlot<Sync>& slot(uint64_t count) const { return slots[count % slots.size()]; }

  size_t size() const {
    const uint64_t popped = header->consumer.count.load(std::memory_order_acquire);
    return std::min<uint64_t>(header->producer.count.load(std::memory_order_acquire) - popped, capacity());
  }

  // The waiting records, oldest first, without those that are popped during the call.
  std::vector<PendingRecord> pending() const {
    std::vector<PendingRecord> records;
    uint64_t popped = header->consumer.count.load(std::memory_order_acquire);
    const uint64_t first = popped;
    const uint64_t waiting =
        std::min<uint64_t>(header->producer.count.load(std::memory_order_acquire) - first, capacity());
    const TimePoint now = Sync::now();
    for (uint64_t at = first; at != first + waiting; ++at) records.push_back(look_at(slot(at), now));
    popped = header->consumer.count.load(std::memory_order_acquire);  // a slot that was not freed was not overwritten
    records.erase(records.begin(), records.begin() + static_cast<ptrdiff_t>(std::min(popped - first, waiting)));
    return records;
  }

 private:
  static PendingRecord look_at(const RingSlot<Sync>& slot, TimePoint now) {
    const auto word = [&](size_t i) { return slot.words[i].load(std::memory_order_acquire); };
    PendingRecord record{.head = {.incarnation = word(0), .id = word(1)}};
    const Duration posted(static_cast<int64_t>(word(2)));
    if (posted >= Duration::zero() && posted < now.time_since_epoch()) record.age = now.time_since_epoch() - posted;
    const uint64_t rest = word(3);
    record.head.type = static_cast<uint16_t>(rest);
    record.bytes = static_cast<uint16_t>(rest >> 16);
    return record;
  }
};

// The common part of the two ends. An end is used by one thread at a time; any thread may call close().
template <typename Sync>
class RingEnd {
 public:
  RingEnd(const BasicRing<Sync>& ring, RingSide<Sync>& own, RingSide<Sync>& peer, Duration spin)
      : ring_(ring), own_(own), peer_(peer), spin_(spin) {}
  RingEnd(const RingEnd&) = delete;
  RingEnd& operator=(const RingEnd&) = delete;

  // Ends the ring for both sides, even if the other one is dead. Nothing more can be pushed; records that were pushed
  // can still be popped.
  void close() {
    own_.closed.store(1, std::memory_order_seq_cst);
    wake_peer();
    ended_.store(1, std::memory_order_seq_cst);
    wake_own();
  }

 protected:
  ~RingEnd() = default;

  bool ended() const {
    return ended_.load(std::memory_order_seq_cst) != 0 || peer_.closed.load(std::memory_order_seq_cst) != 0;
  }

  void wake_peer() {
    if (peer_.asleep.load(std::memory_order_seq_cst) == 0) return;
    if (peer_.asleep.exchange(0, std::memory_order_seq_cst) != 0) Sync::wake(peer_.asleep);
  }

  // Polls until the state is not kNotYet.
  template <typename Poll>
  RingState wait(Poll poll, const Deadline& deadline) {
    RingState state = poll();
    if (state != RingState::kNotYet || Sync::now() >= deadline.when()) return state;
    state = spin(poll);
    if (state != RingState::kNotYet) return state;
    while (true) {
      own_.asleep.store(1, std::memory_order_seq_cst);
      state = poll();
      if (state != RingState::kNotYet || Sync::now() >= deadline.when()) break;
      Sync::wait(own_.asleep, 1, deadline);
    }
    own_.asleep.store(0, std::memory_order_relaxed);
    return state;
  }

  // Whether or not this end has announced that it sleeps: the peer may have cleared that.
  void wake_own() {
    own_.asleep.exchange(0, std::memory_order_seq_cst);
    Sync::wake(own_.asleep);
  }

  const BasicRing<Sync> ring_;
  RingSide<Sync>& own_;
  RingSide<Sync>& peer_;
  uint64_t count_ = 0;  // the value of own_.count, unless somebody else wrote there

 private:
  template <typename Poll>
  RingState spin(Poll poll) const {
    RingState state = RingState::kNotYet;
    if (spin_ == Duration::zero()) return state;
    for (const TimePoint end = Sync::now() + spin_; state == RingState::kNotYet && Sync::now() < end; state = poll())
      Sync::pause();
    return state;
  }

  const Duration spin_;
  typename Sync::template Atomic<uint32_t> ended_{0};
};

template <typename Sync>
class RingProducer : public RingEnd<Sync> {
 public:
  RingProducer(const BasicRing<Sync>& ring, Duration spin)
      : RingEnd<Sync>(ring, ring.header->producer, ring.header->consumer, spin) {}

  // Pushes a record once there is room. REQUIRES: the payload fits.
  RingState push(const RecordHead& head, std::span<const std::byte> payload, const Deadline& deadline) {
    return write_if_ready(this->wait([this] { return poll(); }, deadline), head, payload);
  }
  // kNotYet if there is none now.
  RingState try_push(const RecordHead& head, std::span<const std::byte> payload) {
    return write_if_ready(poll(), head, payload);
  }

 private:
  RingState poll() {
    if (this->ended()) return RingState::kEnded;
    if (this->count_ - popped_ < this->ring_.capacity()) return RingState::kReady;
    popped_ = this->peer_.count.load(std::memory_order_seq_cst);
    const uint64_t used = this->count_ - popped_;
    if (used > this->ring_.capacity()) return RingState::kBroken;
    return used < this->ring_.capacity() ? RingState::kReady : RingState::kNotYet;
  }

  RingState write_if_ready(RingState state, const RecordHead& head, std::span<const std::byte> payload) {
    if (state != RingState::kReady) return state;
    write(this->ring_.slot(this->count_), head, payload);
    this->own_.count.store(++this->count_, std::memory_order_seq_cst);
    this->wake_peer();
    return state;
  }

  static void write(RingSlot<Sync>& slot, const RecordHead& head, std::span<const std::byte> payload) {
    const auto put = [&](size_t i, uint64_t value) { slot.words[i].store(value, std::memory_order_release); };
    put(0, head.incarnation);
    put(1, head.id);
    put(2, static_cast<uint64_t>(Sync::now().time_since_epoch().count()));
    put(3, uint64_t{head.type} | uint64_t{payload.size()} << 16);
    size_t word = RingSlot<Sync>::kHeadWords;
    for (size_t at = 0; at < payload.size(); at += sizeof(uint64_t)) {
      uint64_t value = 0;
      std::memcpy(&value, payload.data() + at, std::min(sizeof value, payload.size() - at));
      slot.words[word++].store(value, std::memory_order_relaxed);
    }
  }

  uint64_t popped_ = 0;  // the consumer's last known count
};

template <typename Sync>
class RingConsumer : public RingEnd<Sync> {
 public:
  RingConsumer(const BasicRing<Sync>& ring, Duration spin)
      : RingEnd<Sync>(ring, ring.header->consumer, ring.header->producer, spin) {}

  // Pops the oldest record once there is one.
  RingState pop(Record& record, const Deadline& deadline) {
    return read_if_ready(this->wait([this] { return poll(); }, deadline), record);
  }
  // kNotYet if there is none now.
  RingState try_pop(Record& record) { return read_if_ready(poll(), record); }

  // Ends a wait, now or later, with kInterrupted unless it can end otherwise. Any thread.
  void nudge() {
    nudged_.store(1, std::memory_order_seq_cst);
    this->wake_own();
  }

 private:
  bool take_nudge() {
    return nudged_.load(std::memory_order_seq_cst) != 0 && nudged_.exchange(0, std::memory_order_seq_cst) != 0;
  }

  RingState poll() {
    if (pushed_ != this->count_) return RingState::kReady;
    const bool ended = this->ended();
    pushed_ = this->peer_.count.load(std::memory_order_seq_cst);
    if (pushed_ - this->count_ > this->ring_.capacity()) {
      pushed_ = this->count_;
      return RingState::kBroken;
    }
    if (pushed_ != this->count_) return RingState::kReady;
    if (ended) return RingState::kEnded;
    return take_nudge() ? RingState::kInterrupted : RingState::kNotYet;
  }

  RingState read_if_ready(RingState state, Record& record) {
    if (state != RingState::kReady) return state;
    if (!read(this->ring_.slot(this->count_), record)) return RingState::kBroken;
    this->own_.count.store(++this->count_, std::memory_order_seq_cst);
    this->wake_peer();
    return state;
  }

  static bool read(const RingSlot<Sync>& slot, Record& record) {
    const auto get = [&](size_t i) { return slot.words[i].load(std::memory_order_relaxed); };
    record.head.incarnation = get(0);
    record.head.id = get(1);
    const uint64_t rest = get(3);
    record.head.type = static_cast<uint16_t>(rest);
    record.bytes = static_cast<uint16_t>(rest >> 16);
    if (rest >> 32 != 0 || record.bytes > kMaxRecordPayload) return false;
    size_t word = RingSlot<Sync>::kHeadWords;
    for (size_t at = 0; at < record.bytes; at += sizeof(uint64_t)) {
      const uint64_t value = get(word++);
      std::memcpy(record.data.data() + at, &value, std::min(sizeof value, record.bytes - at));
    }
    return true;
  }

  uint64_t pushed_ = 0;  // the producer's last known count
  typename Sync::template Atomic<uint32_t> nudged_{0};
};

}  // namespace tessera
