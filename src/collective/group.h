// A group of ranks of one host that read each other's memory: who is in it, what each shows, and what all do together.
//
// Every rank has a *page* of words that only it writes and its peers map read-only, and all share one *bell page*,
// writable by all, that carries wake-ups only (docs/formats/etp-pages.md). A gather or a fold is a one-sided read of
// memory that a peer's words say may be read, so that ranks may do them in different orders (gather.h, fold.h).
// Numbered collectives are for what all ranks do together.
//
// A group fails as a whole: the first error of any rank (a peer died or closed its group early, a collective that does
// not match, a word that cannot be true) becomes every rank's within a second, whatever it waits for, and every later
// call throws it. Shards stay intact: nobody ever writes a peer's memory.
//
// What peers write is checked before it is used: a rank that misbehaves costs the group, not the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "collective/bootstrap.h"
#include "collective/words.h"
#include "device/condition.h"
#include "device/device.h"
#include "tessera/dtype.h"
#include "tessera/error.h"

namespace tessera::collective {

class Readers;

// What moves the bytes. A back end that needs matched order has its gathers and folds called by all ranks in one order:
// the runtime then compares the planned order of all ranks before a step.
enum class Backend : uint8_t { kPulls, kNccl };
struct BackendTraits {
  std::string_view name;
  bool needs_matched_order = false;
};
// Throws Error(kUnimplemented), which says how to get it, if this build lacks it.
BackendTraits traits_of(Backend backend);

struct GroupOptions {
  int rank = 0;
  int size = 1;
  std::string name = "etp";                    // for messages and thread names
  Duration timeout = std::chrono::minutes(1);  // of every wait that is given no deadline of its own
  device::Device* device = nullptr;            // outlives the group; host waits go through it
  uint32_t slots = 1 << 16;                    // weights that the group can have; the same on all ranks
  bool in_process = false;                     // all ranks are threads or fibers of this process
  Backend backend = Backend::kPulls;
  bool matched_order = false;  // backend() says that it needs it in any case: for tests; the same on all ranks
};

// A place in a rank's shared memory, as its peers name it.
struct MemoryRef {
  uint32_t arena = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool operator==(const MemoryRef&) const = default;
};

// A gradient that a rank shows in its page.
struct ShownGradient {
  MemoryRef memory;
  DType dtype = DType::kF32;
};

// One replicated tensor of sum_exchange().
struct SumPart {
  const void* gradient = nullptr;  // contiguous, in memory that refer() takes; null: this rank has none
  DType gradient_dtype = DType::kF32;
  void* accumulated = nullptr;  // contiguous, overlaps no gradient; null: this rank wants no result
  DType accumulated_dtype = DType::kF32;
  int64_t elements = 0;
  float scale = 1;
  bool first = false;  // nothing is accumulated yet: the sum begins with the first rank's term, not with *accumulated
  std::string_view name;
};

// Thread-safe, except that form() and close() are called once. Methods throw the group's error once it has failed.
// Collectives of one rank are carried out one at a time; a second thread waits for its turn. A forked child must not
// use its parent's group; it may close() or destroy it, which does nothing there.
class Group : public std::enable_shared_from_this<Group> {
 public:
  // All ranks call it with the same size, name and slots. Returns when every rank has mapped every page. Errors name
  // the rank that died, stopped, is on another host, belongs to another user or disagrees, and are then errors of all
  // ranks that still wait; kDeadlineExceeded after `timeout`.
  static std::shared_ptr<Group> form(const Exchange& exchange, const GroupOptions& options);
  // Fails the group on all ranks unless it was closed.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  const std::string& name() const;
  Duration timeout() const;
  uint32_t slots() const;
  device::Device& device() const;
  BackendTraits backend() const;
  Deadline deadline() const { return Deadline::after(timeout()); }  // of a wait that begins now
  std::string describe(int rank) const;                             // "rank 2 (pid 4711)"

  // Memory of peers --------------------------------------------------------------------------------------------------

  // Of this rank's memory, for peers. [data, data + bytes) must lie in one block of SharedHeap::process() (any memory
  // if the group is in_process). Its arena is sealed against writable mappings of others when a peer first asks.
  MemoryRef refer(const void* data, size_t bytes) const;
  // Where a peer's memory lies here, to be read only. The first call for an arena asks that peer's service thread for
  // it and blocks until it answers, at most for timeout(). Fails the group if the place is not within the arena. What
  // is returned is mapped as long as the group lives; it may be read while the protocol of the words says so.
  const std::byte* map(int rank, const MemoryRef& ref);

  // Words ------------------------------------------------------------------------------------------------------------

  // Stores with release order, after everything that this thread has written, and wakes ranks that sleep. `value` must
  // not be less than the word's. stream_fence() first if data was written past the caches.
  // set() is the host's and is recorded as such; store() is for the body of an operation that lists edge() in `writes`.
  void set(Word word, uint32_t slot, uint64_t value);
  void set(Word word, std::span<const uint32_t> slots, std::span<const uint64_t> values);  // wakes once
  void store(Word word, uint32_t slot, uint64_t value);
  void store(Word word, std::span<const uint32_t> slots, std::span<const uint64_t> values);  // wakes once
  // For the recorder: a word in terms that all groups and ranks share.
  device::WordEdge edge(int rank, Word word, uint32_t slot, uint64_t value) const;
  // The recorder's device begins to record: writes this rank's words as they are.
  void note_words() const;
  // The same on all ranks, and no other group's.
  uint64_t key() const;
  // Loads with acquire order. A value that goes back or is beyond kMaxWordValue fails the group. What else is possible
  // depends on other words: who reads a word asks for it, and calls distrust() if it is not.
  uint64_t get(int rank, Word word, uint32_t slot) const;
  // Fails the group: `rank`'s word says what it cannot say while `because` holds: "rank 0 is still in interval 3".
  [[noreturn]] void distrust(int rank, Word word, uint32_t slot, std::string_view because) const;
  // Met once rank's word is at least `value`. `what` ends a sentence: "version 7 of wte.weight".
  std::shared_ptr<const device::Condition> at_least(int rank, Word word, uint32_t slot, uint64_t value,
                                                    std::string what) const;
  // The same of all other ranks.
  std::shared_ptr<const device::Condition> all_at_least(Word word, uint32_t slot, uint64_t value,
                                                        std::string what) const;

  // For conditions on words, their sleep() and explain(): sleeps on this rank's bell until `ready`, or the deadline;
  // says which of `ranks` are stopped, have died or have left.
  void sleep_until(const std::function<bool()>& ready, const Deadline& deadline) const;
  std::string explain(std::span<const int> ranks) const;
  // Throws if the group has failed, and fails it if `rank` is_final().
  void require_present(int rank) const;
  // Whether another rank has finished or left, and will change no word any more. To be asked before its words are read,
  // where it counts: what it has written before is there.
  bool is_final(int rank) const;

  // Shows where the gradient of a round lies, before kProduced says that it is there. Of 0 bytes: this rank has none in
  // that round, and contributes nothing. The round that it replaces,
  // kShownRounds earlier, must have been folded by all owners.
  void set_gradient(uint32_t slot, uint64_t interval, uint64_t round, const ShownGradient& gradient);
  // Empty if the rank does not show that round (any more).
  std::optional<ShownGradient> gradient(int rank, uint32_t slot, uint64_t interval, uint64_t round) const;

  // Numbered collectives ---------------------------------------------------------------------------------------------
  //
  // All ranks call them in one order, with the same `what` and sizes. A call that does not match fails the group, with
  // an error that names both calls. They block until all ranks have called, at most for timeout(), which fails the
  // group with an error that says who did not come and whether it is stopped.

  // Blobs of any sizes up to kMaxBlobBytes. `timeout`: in place of timeout().
  std::vector<std::string> exchange(std::string_view what, std::string blob, std::optional<Duration> timeout = {});
  // Element by element, the largest of all ranks; NaN if any is. The same bits on all ranks.
  void max_exchange(std::span<float> values);
  // For each part, acc = f32(accumulated); for q = 0..N-1, unless q has no gradient: acc = acc + f32(g_q) * scale;
  // accumulated = round(acc): the same bits on all ranks whose accumulated values are the same. Parts that no rank has
  // a gradient for stay untouched. Returns for each part how many ranks had one. The gradients may be written again
  // when it returns. Name, elements, scale and dtypes of a part are the same on all ranks.
  std::vector<int> sum_exchange(std::span<const SumPart> parts);
  void barrier(std::string_view what);
  // Takes part in the next numbered call, whatever that is, with a refusal: on all other ranks that call throws
  // Error(reason's code, "rank R: " and its text, of which 2048 bytes are kept). The call's number counts on all ranks,
  // and the group stays usable. Does not wait for the others; this rank's next numbered call does. If this rank drops
  // the group before that, the group fails with the same error. Of several ranks that refuse,
  // the error of the lowest is thrown.
  // `forwarded`: another rank has refused, whom the text names, and this one passes it on.
  // REQUIRES: !reason.ok()
  void refuse(std::string_view what, const Status& reason, bool forwarded = false);
  // For waits of other kinds than numbered calls: throws what another rank has refused, if it has refused the call that
  // this rank would make next, and takes part in it. Never blocks.
  void hear_refusal();
  // Returns which of these ranks have come to the numbered call that this rank would make next, and have not refused
  // it.
  std::vector<int> called_next(std::span<const int> ranks) const;
  // Throws kMismatch, which says that `rank` has come to another call than this one, which waits for `waits`, and
  // refuses that call with the same text. REQUIRES: called_next() has named the rank.
  void refuse_difference(int rank, const std::string& waits) const;
  // Returns how many refusals this rank has told or been told: the same on all ranks between the same numbered calls.
  uint64_t refusals() const;
  struct Refusal {
    Status reason;
    bool own = false;  // this rank's; else the text names whose it is
  };
  // Returns the last one of them.
  std::optional<Refusal> latest_refusal() const;

  static constexpr size_t kMaxBlobBytes = size_t{256} << 20;

  // For whoever numbers this rank's words from their beginning, once: throws kInvalidArgument the second time.
  void claim();

  // Failure and end --------------------------------------------------------------------------------------------------

  // Fails the group on all ranks; the first failure counts.
  void fail(const Status& status);
  // The group's failure, this rank's or a peer's. Never blocks.
  Status status() const;
  // Tells the others that this rank changes no word any more: a peer that waits for one of them gets kPeerLost. Does
  // not wait. Collectives may follow.
  void finish();
  // Keeps the memory of others for this rank, which may read it until the last of these has gone; then they are told so
  // for ever. Null in a forked child.
  std::shared_ptr<const void> reading() const;
  // Who may read this rank's memory.
  std::shared_ptr<const Readers> readers() const;
  // Leaves, and waits until all ranks have: a peer that waits for this rank does not learn that it died.
  // Afterwards every call throws. Idempotent.
  void close(const Deadline& deadline);

 private:
  struct Impl;
  explicit Group(std::unique_ptr<Impl> impl);
  void note_words(std::span<const device::WordEdge> words, std::string_view subject) const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::collective
