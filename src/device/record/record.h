// What the recorder keeps of a schedule: one record an operation, event, wait or collective, in blocks.
//
// The records of a rank are in the order of its host's calls, which the runtime's lock makes a total order. The host is
// actor 0; every stream with a thread or a queue of its own is another actor. What a record says happens
//   * on actor 0: after everything earlier on actor 0;
//   * on a stream: after everything earlier on that stream, and after everything earlier on actor 0.
// The exception is kWordWait of a stream, which is recorded when the wait ends: it belongs in front of the operation
// that it names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/rounding.h"
#include "base/ticks.h"
#include "device/access.h"

namespace tessera::device {

enum class RecordKind : uint8_t {
  kActor,        // `actor` is a stream, called `name`
  kRegion,       // from now on accesses may name `region`, of `bytes` bytes, called `name`
  kRegionEnd,    // `region` is gone; its number is not used again
  kOperation,    // `operation` of `actor` was enqueued; `words` are those that it writes when it ends
  kHostAccess,   // the host itself reads or writes `accesses`
  kEventRecord,  // `event` is everything that `actor` was given so far
  kEventWait,    // what `actor` gets from now on happens after `event`
  kWordWrite,    // actor 0 writes `words`
  kWordWait,     // `operation` of `actor`, or, if that is 0, the host, saw `words`: each has that value or more
  kCollective,   // the host takes part in collective `number` (called `name`) of group `subject`, which has `ranks`
                 // ranks
  kRan,          // `operation` of `actor` ran from `begin` to `end`; orders nothing. Of the host: its last operation
  kOperationAccess,  // `operation` of `actor`, called `name` and `subject`, makes `accesses`, too, as was known only
                     // once it could begin; recorded before its waits
};
std::string_view to_string(RecordKind kind);

// A stretch of memory that peers may see, by number: an arena, a mapped arena of a peer.
struct RegionId {
  static constexpr uint64_t kPrivate = 0;  // all memory that is in no region; its offsets are addresses
  int owner = 0;                           // the rank whose memory it is
  uint64_t number = kPrivate;              // the owner's
  auto operator<=>(const RegionId&) const = default;
};

// An Access, with its address in terms that all ranks share.
struct RecordedAccess {
  RegionId region{};
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t version = 0;
  bool write = false;
  bool operator==(const RecordedAccess&) const = default;
};

// A view: texts and spans belong to the RecordBlock that it came from. Fields that its kind does not use are 0 or
// empty.
struct Record {
  RecordKind kind = RecordKind::kOperation;
  int rank = 0;
  uint32_t actor = 0;
  uint64_t sequence = 0;   // in the log of its rank: 1, 2, 3, ...
  uint64_t operation = 0;  // in its actor: 1, 2, 3, ...
  uint64_t event = 0;      // in its rank: 1, 2, 3, ...; every record() of an event has a number of its own
  uint32_t waits = 0;      // of kOperation: how many kWordWait records name it once it runs
  uint64_t number = 0;     // of a collective, in its group
  uint32_t ranks = 0;      // of a collective's group
  RegionId region{};       // of kRegion and kRegionEnd
  uint64_t bytes = 0;      // of kRegion
  int64_t begin = 0;       // of kRan: nanoseconds of CLOCK_MONOTONIC
  int64_t end = 0;
  std::string_view name{};
  std::string_view subject{};
  std::span<const RecordedAccess> accesses{};
  std::span<const WordEdge> words{};
};

// "rank 1, stream gather: operation 7 gather wte.weight"; for messages.
std::string to_string(const Record& record);

class RecordBlock;

// Goes through the records of a block, and makes each when it is asked for.
class RecordIterator {
 public:
  using value_type = Record;
  using difference_type = std::ptrdiff_t;

  Record operator*() const;
  RecordIterator& operator++();
  void operator++(int) { ++*this; }
  bool operator==(const RecordIterator& other) const { return at_ == other.at_; }

 private:
  friend class RecordBlock;
  const RecordBlock* block_ = nullptr;
  const std::byte* at_ = nullptr;
  uint64_t sequence_ = 0;
};

// Records, each with all that it points to, one behind the other in memory that is allocated once. Thread-compatible;
// move-only, and a move leaves the records where they are.
class RecordBlock {
 public:
  static constexpr size_t kBytes = size_t{64} << 10;

  // What is kept of a record, with its accesses, words and texts behind it. Which field of Record `number` and `count`
  // are depends on its kind.
  struct Entry {
    RecordKind kind = RecordKind::kOperation;
    uint32_t actor = 0;
    uint32_t count = 0;  // waits or ranks
    uint32_t access_count = 0;
    uint32_t word_count = 0;
    uint32_t bytes = 0;             // with all that is behind it
    uint64_t number = 0;            // of an operation, event, collective or region
    const char* name = nullptr;     // a literal, or a copy in the block
    const char* subject = nullptr;  // a copy in the block
    uint64_t begin = 0;             // of kRan: ticks(). Of kRegion: its bytes
    uint64_t end = 0;               // of kRan: ticks(). Of kRegion and kRegionEnd: the owner

    RecordedAccess* accesses() { return reinterpret_cast<RecordedAccess*>(this + 1); }
    const RecordedAccess* accesses() const { return reinterpret_cast<const RecordedAccess*>(this + 1); }
    WordEdge* words() { return reinterpret_cast<WordEdge*>(accesses() + access_count); }
    const WordEdge* words() const { return reinterpret_cast<const WordEdge*>(accesses() + access_count); }
  };
  static_assert(sizeof(Entry) == 64);

  explicit RecordBlock(size_t bytes = kBytes);
  RecordBlock(RecordBlock&&) noexcept = default;
  RecordBlock& operator=(RecordBlock&&) noexcept = default;

  // Forgets what it holds. Its next records are of this rank, and numbered from `first` on.
  void begin(int rank, uint64_t first);
  // One more record, with copies of its texts; `name` is empty where it is a literal. Its other fields, accesses and
  // words are the caller's to write, in place: a copy would have to wait for what was written a moment ago. Null, and
  // nothing has changed, if there is no room.
  Entry* add(RecordKind kind, std::string_view name, std::string_view subject, size_t accesses, size_t words);
  static size_t bytes_for(std::string_view name, std::string_view subject, size_t accesses, size_t words);
  size_t capacity() const { return capacity_; }
  // What the ticks of its records are as times.
  void set_scale(const TickScale& scale) { scale_ = scale; }

  std::ranges::subrange<RecordIterator> records() const;
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }

 private:
  friend class RecordIterator;

  std::unique_ptr<std::byte[]> memory_;
  size_t capacity_ = 0;
  size_t used_ = 0;
  int rank_ = 0;
  uint64_t first_ = 1;
  size_t count_ = 0;
  TickScale scale_{};
};

inline size_t RecordBlock::bytes_for(std::string_view name, std::string_view subject, size_t accesses, size_t words) {
  const size_t text = (name.empty() ? 0 : name.size() + 1) + (subject.empty() ? 0 : subject.size() + 1);
  return sizeof(Entry) + accesses * sizeof(RecordedAccess) + words * sizeof(WordEdge) + round_up(text, alignof(Entry));
}

inline RecordBlock::Entry* RecordBlock::add(RecordKind kind, std::string_view name, std::string_view subject,
                                            size_t accesses, size_t words) {
  const size_t bytes = bytes_for(name, subject, accesses, words);
  if (bytes > capacity_ - used_) return nullptr;
  auto* const entry = new (memory_.get() + used_) Entry;
  entry->kind = kind;
  entry->access_count = static_cast<uint32_t>(accesses);
  entry->word_count = static_cast<uint32_t>(words);
  entry->bytes = static_cast<uint32_t>(bytes);
  auto* text = reinterpret_cast<char*>(entry->accesses() + accesses) + words * sizeof(WordEdge);
  const auto keep = [&text](std::string_view from) {
    char* const kept = text;
    std::memcpy(kept, from.data(), from.size());
    kept[from.size()] = '\0';
    text += from.size() + 1;
    return kept;
  };
  if (!name.empty()) entry->name = keep(name);
  if (!subject.empty()) entry->subject = keep(subject);
  used_ += bytes;
  ++count_;
  return entry;
}

// A log in memory: the blocks of one rank, in order. A value.
using RecordLog = std::vector<RecordBlock>;

}  // namespace tessera::device
