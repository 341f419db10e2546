// Buffers for gathered weights and gradients, lent by ticket.
//
// reserve() makes a ticket for a key, without memory. get() lends it a buffer of that key, the same until release().
// Then others may get the buffer, each with the token of its last reader: who writes to it waits for that first. Two
// tickets never hold one buffer at a time. In the graphed chain a ticket gets the address that it had before, if that
// is free. Elsewhere it gets what was released last, so that a pool can shrink.
//
// A captured ticket gets the same address each time: its buffer is kept for captured tickets, which share it as they
// hold it in turn.
//
// Below a cap, buffers that nobody holds make room for new ones of other keys, those that were released first before
// others. Only what is held or captured at once can take more than the cap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "etp/schedule/buffer_key.h"

namespace tessera::etp {

// What ends the use of a buffer, such as an event of the stream that read it last; the cache only passes it on. Null:
// there is nothing to wait for.
using LastReader = std::shared_ptr<void>;

inline constexpr size_t kBufferAlignment = 64;

// Where buffers come from. allocate() returns memory at a multiple of kBufferAlignment, or throws. free() gets memory
// that it has allocated and may be read until `last` ends.
struct BufferMemory {
  std::function<std::byte*(int64_t bytes)> allocate;
  std::function<void(std::byte* memory, int64_t bytes, const LastReader& last)> free;
};

struct BufferTicket {
  uint64_t number = 0;  // from 1; 0: none

  friend bool operator==(const BufferTicket&, const BufferTicket&) = default;
};

// A buffer that a ticket holds.
struct LentBuffer {
  std::byte* memory = nullptr;
  int64_t bytes = 0;
  LastReader wait_for{};  // before the first write
};

struct CacheReport {
  struct Pool {
    BufferKey key;
    int64_t buffers = 0;
    int64_t held = 0;       // of them, by tickets
    int64_t most_held = 0;  // at once, since the pool was made
    int64_t bytes = 0;      // of all its buffers
  };
  struct Weight {
    std::string name;
    int64_t held_bytes = 0;
    int64_t most_held_bytes = 0;
  };

  std::vector<Pool> pools;      // that have had a buffer, in the order of their first reserve()
  std::vector<Weight> weights;  // that have held one, likewise
  std::array<int64_t, kChains> chain_bytes{};
  int64_t bytes = 0;  // of all buffers
  int64_t most_bytes = 0;
  int64_t held_bytes = 0;
  int64_t captured_bytes = 0;  // of buffers that captured tickets have
  int64_t allocations = 0;
  int64_t over_cap = 0;  // of them, those after which all buffers took more than the cap
  int64_t frees = 0;
};

// Not thread-safe. Logs each allocation at debug level. Frees its memory when it is destroyed; no buffer may be in use
// then. Throws Error(kInvalidArgument) for a ticket that it does not know.
class BufferCache {
 public:
  explicit BufferCache(BufferMemory memory, std::optional<int64_t> cap_bytes = std::nullopt);
  ~BufferCache();
  BufferCache(const BufferCache&) = delete;
  BufferCache& operator=(const BufferCache&) = delete;

  // A new ticket at each call; `weight` is the name that its bytes are counted for. Throws Error(kInvalidArgument) for
  // a key without elements.
  BufferTicket reserve(const BufferKey& key, std::string_view weight);

  // The ticket's buffer; allocates if no buffer of its key is free, after make_room(). While the ticket holds it, the
  // same again.
  LentBuffer get(BufferTicket ticket);
  // Frees what nobody holds, as far as it takes for one more buffer of each of these keys to fit below the cap, for
  // get(), or for capture() of new tickets. What they can use stays, what is captured, and what is in a capture pool.
  void make_room(std::span<const BufferKey> keys, bool for_capture = false);
  // Whether tickets can be captured with one more buffer of each of these keys while all that is kept fits below the
  // cap.
  bool fits_capture(std::span<const BufferKey> keys);
  // Others may get the buffer, and wait for `last`. Throws Error(kInvalidArgument) if the ticket holds none.
  void release(BufferTicket ticket, LastReader last);
  bool holds(BufferTicket ticket) const;
  // The user's note of how many of the first bytes of the ticket's buffer are not zero: all of a new one.
  int64_t& written(BufferTicket ticket);

  // As get(), and from now until uncapture() the ticket is lent this buffer only, and it is kept for captured tickets.
  // One that other captured tickets have is preferred. get() of a captured ticket whose buffer another one holds throws
  // Error(kInternal).
  LentBuffer capture(BufferTicket ticket);
  void uncapture(BufferTicket ticket);
  // Whether nobody holds the buffer of a captured ticket.
  bool is_free(BufferTicket ticket) const;
  // Releases a buffer that has not been read: who read it last stays.
  void put_back(BufferTicket ticket);

  // The end of a step, when nothing is in flight: frees what no ticket has held since the last call. Not what captured
  // tickets have, and not in a capture pool. Returns the bytes that it has freed.
  int64_t end_step();
  // Frees all buffers, those that are held once they are released. Tickets stay valid, and are captured no longer.
  void clear();
  // From now on graphed buffers come out of `pool`; each that there is, is allocated there again and freed here. Throws
  // Error(kInvalidArgument) that names the weight if a ticket holds one, or is captured with one.
  void reallocate(BufferMemory pool);

  CacheReport report() const;
  int64_t kept_bytes() const { return kept_bytes_; }  // of what tickets hold or are captured with

 private:
  struct Buffer {
    std::byte* memory = nullptr;
    LastReader last{};
    int64_t written = 0;
    uint64_t holder = 0;  // a ticket's number
    uint64_t released = 0;
    bool used = false;     // since end_step()
    bool cleared = false;  // freed as soon as it is released
    bool in_capture_pool = false;
    uint32_t captured = 0;  // tickets
  };
  struct Pool {
    BufferKey key;
    int64_t bytes = 0;             // of one buffer
    std::vector<uint32_t> all{};   // indices of buffers_
    std::vector<uint32_t> free{};  // released last at the end
    int64_t most_held = 0;
    size_t wanted = 0;  // in make_room() and fits_capture()
    bool had_any = false;
  };
  struct Ticket {
    uint32_t pool = 0;
    uint32_t weight = 0;
    uint32_t buffer = kNone;  // the one it holds, or held last
    bool captured = false;
  };
  static constexpr uint32_t kNone = UINT32_MAX;

  void uncapture(Ticket& ticket);
  Ticket& find(BufferTicket ticket);
  const Ticket& find(BufferTicket ticket) const;
  bool holds(const Ticket& ticket, uint64_t number) const;
  uint32_t pool_of(const BufferKey& key);
  void make_room_for_wanted(int64_t bytes);
  std::vector<uint32_t> want(std::span<const BufferKey> keys);
  size_t spare(const Pool& pool) const;  // free ones that no capture has
  size_t captured_free(const Pool& pool) const { return pool.free.size() - spare(pool); }
  uint32_t allocate(Pool& pool);
  uint32_t choose(Pool& pool, const Ticket& ticket, bool for_capture);
  LentBuffer lend(uint64_t number, bool for_capture);
  void free_buffer(Pool& pool, uint32_t index);
  const BufferMemory& memory_of(const Buffer& buffer) const;
  void hold(const Pool& pool, const Ticket& ticket, int by);

  BufferMemory memory_;
  std::optional<int64_t> cap_bytes_;
  BufferMemory capture_;  // null functions: no capture pool yet
  std::vector<Pool> pools_{};
  std::unordered_map<BufferKey, uint32_t> pool_of_key_{};
  std::vector<Ticket> tickets_{};
  std::vector<Buffer> buffers_{};
  std::vector<uint32_t> vacant_{};  // indices of buffers_ without memory
  std::vector<CacheReport::Weight> weights_{};
  std::unordered_map<std::string, uint32_t> weight_of_{};
  uint64_t releases_ = 0;
  int64_t kept_bytes_ = 0;
  CacheReport sums_{};  // its numbers; the lists stay empty
};

}  // namespace tessera::etp
