// The buffers of gathered weights, each with a stamp of what it holds.
//
// A capture reserves a slot for each use: its address is the same in each replay. While the part is recorded, nothing
// is gathered, and the slot is lent to the FullWeight that the program gets.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "device/device.h"
#include "etp/parameter.h"
#include "etp/schedule/buffer_key.h"
#include "etp/schedule/cache.h"
#include "etp/schedule/gather_cost.h"
#include "etp/schedule/states.h"

namespace tessera::etp {

// What a buffer holds, or will once its gather has run.
struct Stamp {
  WeightId weight = 0;
  uint64_t version = 0;
  Plane plane = Plane::kRow;
  DType dtype = DType::kF32;
  bool stack = false;  // all of the stack that begins with the weight
  bool operator==(const Stamp&) const = default;
};

// Of the weight's present version.
Stamp stamp_of(const Parameter& parameter, Plane used);

// Of the buffers of a weight that is gathered for a use of that plane.
BufferKey buffer_key(const Parameter& parameter, Plane used);

// Of a use that gathers these at once, one buffer each; those that are read where they lie cost nothing.
GatherCost gather_cost(std::span<const Parameter* const> buffers, bool experts, BufferKeys& keys);

// Thread-safe: a FullWeight returns its buffer on any thread, also after the runtime.
class GatherMemory {
 public:
  struct Options {
    bool poison = false;                              // released buffers
    std::optional<int64_t> cap_bytes = std::nullopt;  // of all buffers
  };
  // `keeper` keeps the device.
  GatherMemory(std::shared_ptr<const void> keeper, device::Device& device, std::shared_ptr<device::Stream> compute,
               const Options& options);
  ~GatherMemory();
  GatherMemory(const GatherMemory&) = delete;
  GatherMemory& operator=(const GatherMemory&) = delete;

  // Below the cap, frees idle buffers for such a gather; blocks until their last readers have ended. What is taken
  // without takes more than the cap where that has no room. Throws what the wait throws. `for_capture`: for reserve().
  void make_room(std::span<Parameter* const> weights, Plane used, bool for_capture = false);
  // Whether reserve() for all of them leaves what is kept below the cap.
  bool fits_capture(std::span<Parameter* const> weights, Plane used);

  // A buffer for one gather of the weight.
  struct Taken {
    uint32_t slot = 0;
    std::byte* data = nullptr;
    device::Event last_reader;     // the gather runs after it
    std::span<std::byte> padding;  // behind the weight's rows: to be zeroed, likewise; empty if it is zero
  };
  // Adds one for each weight, with a stamp of its present version. `reserved`: empty, or the slots of a replay. `step`:
  // they will be gathered in the background (kStart) or are at once (kRunNow). Throws what a release() could not.
  void take(std::span<Parameter* const> weights, Plane used, StateStep step, std::span<const uint32_t> reserved,
            std::vector<Taken>& taken);

  // Their gather in the background has been waited for.
  void arrive(std::span<const uint32_t> slots);
  WeightState state(uint32_t slot) const;
  // Of a buffer that is taken for the weight; kNone: there is none.
  WeightState state_of(WeightId weight) const;
  // The buffers are used from now on. Throws Error(kInternal), which names the weight, unless each holds its weight's
  // present version. `noted`: a recorder is told that the host reads them, if that computes inline; not needed where
  // the host has just written them.
  void use(std::span<const uint32_t> slots, std::span<Parameter* const> weights, Plane used, bool noted);
  // Of what was acquired. Whoever writes to the buffer next waits for what computes on it now.
  void release(uint32_t slot) noexcept;
  // Of a gather that nobody will use.
  void drop(uint32_t slot, const device::Event& arrives);

  // Captures. Between these two, what computed before the capture ends before `before`, which is waited for by who gets
  // a buffer that is released in between; and `released` is called, without a lock, when a reserved slot is.
  void begin_capture(device::Event before, std::function<void(uint32_t slot)> released);
  void end_capture();
  struct Reserved {
    uint32_t slot = 0;
    std::byte* data = nullptr;
  };
  // For one use in each replay. Other captured uses get the buffer in a replay after release(), and in the capture
  // after put_back().
  Reserved reserve(const Parameter& parameter, Plane used);
  void put_back(uint32_t slot);
  // Whether nobody has the buffer of a reserved slot.
  bool is_free(uint32_t slot) const;
  // After an error in a replay: whatever its state, nobody has it. Who gets the buffer next waits for `last`.
  void recover(uint32_t slot, const device::Event& last);
  // The capture ends. A slot that the program still has stays its own until release().
  void forget(uint32_t slot);
  // Graphed buffers come out of `pool` from now on; those that there are move there, and change their addresses.
  void reallocate(BufferMemory pool);

  // The end of a step, when nothing is in flight: frees what the whole step has not used. Returns the bytes. Throws
  // what the wait for a last reader throws.
  int64_t end_step();
  // Nothing computes any longer.
  void close();
  CacheReport report() const;
  int64_t kept_bytes() const;  // of buffers in use, and of those that captures have

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Slot {
    BufferTicket ticket{};
    std::byte* data = nullptr;
    int64_t bytes = 0;
    Stamp stamp{};
    std::string_view weight{};
    StateMachine state{Movement::kGather};
    bool reserved = false;
    bool forgotten = false;  // but the program has it
    uint32_t next_idle = kNone;
  };
  // A buffer that the cache has freed, and what may still read it.
  struct Freed {
    device::Buffer buffer;
    std::unique_ptr<std::byte, std::function<void(std::byte*)>> pooled;  // instead: of a capture pool
    LastReader last;
  };
  // Waits without the lock.
  void let_go();
  void let_go_quietly() noexcept;
  Taken lend(uint32_t slot, const Parameter& parameter, Plane used, StateStep step) REQUIRES(mutex_);
  void check_stamp(const Slot& slot, const Stamp& wanted) const REQUIRES(mutex_);
  // The first idle slot of a weight's or a stack's plane. Slots keep their tickets: a steady state reserves none.
  uint32_t& first_idle(WeightId weight, bool stack, Plane used) REQUIRES(mutex_);
  // The same; makes one if there is none. It stays idle until leave_idle(), which takes the first of a list.
  uint32_t idle_slot(const Parameter& parameter, Plane used) REQUIRES(mutex_);
  void leave_idle(uint32_t slot) REQUIRES(mutex_);
  void become_idle(uint32_t slot) REQUIRES(mutex_);
  void give(uint32_t slot, LastReader last) REQUIRES(mutex_);
  void give_back(uint32_t slot) REQUIRES(mutex_);  // what was acquired
  void note_read(const char* name, const Slot& slot) REQUIRES(mutex_);

  const std::shared_ptr<const void> keeper_;
  device::Device& device_;
  const Options options_;
  mutable Mutex mutex_;
  std::shared_ptr<device::Stream> compute_ GUARDED_BY(mutex_);                 // null once closed
  std::unordered_map<std::byte*, device::Buffer> buffers_ GUARDED_BY(mutex_);  // except a capture pool's
  std::vector<Freed> freed_ GUARDED_BY(mutex_);
  BufferCache cache_ GUARDED_BY(mutex_);
  std::vector<Slot> slots_ GUARDED_BY(mutex_);
  std::array<std::vector<std::array<uint32_t, 2>>, 2> first_idle_ GUARDED_BY(mutex_);  // of weights, and of stacks
  std::function<void(uint32_t slot)> captured_release_ GUARDED_BY(mutex_);             // empty: no capture
  device::Event before_capture_ GUARDED_BY(mutex_);
  std::exception_ptr failure_ GUARDED_BY(mutex_);  // of a release()
};

}  // namespace tessera::etp
