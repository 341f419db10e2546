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
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

// Records and what they point to, in arrays that are allocated once. Thread-compatible; move-only, and a move leaves
// the records where they are.
class RecordBlock {
 public:
  static constexpr size_t kRecords = 512;
  static constexpr size_t kAccesses = 2048;
  static constexpr size_t kWords = 2048;
  static constexpr size_t kTextBytes = size_t{32} << 10;

  RecordBlock();
  RecordBlock(RecordBlock&&) noexcept = default;
  RecordBlock& operator=(RecordBlock&&) noexcept = default;

  // Copies the record with all that it points to. False, and nothing has changed, if there is no room left; a record
  // that is too large for an empty block (fits() is false) is refused by every block.
  bool append(const Record& record);
  static bool fits(const Record& record);

  // What append() does, in place: room for a record with that many accesses and words and that much text. Null if there
  // is none. The caller fills in the rest, among it the elements of accesses() and words().
  struct Space {
    Record* record;
    RecordedAccess* accesses;
    WordEdge* words;
    // All but texts, accesses and words.
    void fill(const Record& from) const;
  };
  bool allot(Space& space, std::string_view name, std::string_view subject, size_t accesses, size_t words);

  std::span<const Record> records() const { return {records_.get(), count_}; }
  bool empty() const { return count_ == 0; }
  void clear();

 private:
  std::string_view keep(std::string_view text);

  std::unique_ptr<Record[]> records_;
  std::unique_ptr<RecordedAccess[]> accesses_;
  std::unique_ptr<WordEdge[]> words_;
  std::unique_ptr<char[]> text_;
  size_t count_ = 0;
  size_t used_accesses_ = 0;
  size_t used_words_ = 0;
  size_t used_text_ = 0;
};

// A log in memory: the blocks of one rank, in order. A value.
using RecordLog = std::vector<RecordBlock>;

}  // namespace tessera::device
