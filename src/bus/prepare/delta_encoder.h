// Finds what a version changes in the one before, before it is offered: writes delta pieces (exec/delta/delta_piece.h)
// to shared memory, which receivers map, and keeps the bits that were sent last, to compare the next version with.
//
//   idle --start()--> comparing --> idle, compared(ok): the slot has a stamp, and deltas that apply to another stamp
//                        \---- aborted: compared(why): the next version is compared with nothing
//
// It covers all routes that are not quantised, and computes their digests, too. On the loop's thread.
// docs/design/delta.md.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bus/prepare/step.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"
#include "bus/session/versions.h"
#include "exec/delta/delta_run.h"
#include "peer/loop_signal.h"
#include "tessera/memory.h"

namespace tessera::bus {

class DeltaEncoder final : public PreparationStep {
 public:
  // The elements of a sent route in a slot.
  using SourceOf = std::function<SourceRoute(const SentRoute& route, uint32_t slot)>;
  // What start() began is over; never called before start() returns.
  using Compared = std::function<void(const Status&)>;

  // Allocates a copy of the sent data; room for pieces is allocated on demand. Throws kResourceExhausted. REQUIRES:
  // `setup` and the memory that source_of() returns outlive it.
  DeltaEncoder(Agent& agent, const SessionSetup& setup, const SourceOf& source_of, Compared compared);
  ~DeltaEncoder() override;  // REQUIRES: not busy

  bool covers(uint32_t sent) const { return part_of_[sent] != kNone; }
  // Where receivers find the route: its piece; and, in place and not reduced, the copy instead of the elements, which
  // may be in private memory.
  void place(uint32_t sent, ServedRoute& served) const;

  void start(int64_t version, uint32_t slot) override;  // REQUIRES: not busy, and nobody reads the slot
  void abort(const Status& status) override;            // compared() follows, if it is busy
  bool busy() const override { return busy_; }
  std::string missing() const override { return "it was still being compared with the last one"; }
  std::string awaited(int64_t version) const override;

  // Of the last version compared into the slot; 0 if that failed.
  Stamp stamp(uint32_t slot) const { return slots_[slot].stamp; }
  // The version that a receiver must hold for the slot's deltas; 0: there are none.
  Stamp base(uint32_t slot) const { return slots_[slot].base; }
  int64_t delta_bytes(uint32_t sent, uint32_t slot) const;  // Grant::kInFull: in full
  // REQUIRES: the batch has digests
  const Digest& digest(uint32_t sent, uint32_t slot) const;
  const Digest& piece_digest(uint32_t sent, uint32_t slot) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr int kFruitless = 8;  // it reports this after so many versions without a delta
  struct Part {
    uint32_t sent = 0;
    bool cast = false;
    uint64_t base = 0;  // offsets: in bases_, and of the piece in a slot
    uint64_t piece = 0;
  };
  struct Slot {
    std::unique_ptr<DeltaRun> run;  // keeps the slot's digests
    Stamp stamp = 0;
    Stamp base = 0;
  };

  void collect_parts(const SourceOf& source_of, std::vector<std::vector<const std::byte*>>& sources);
  void finish();
  void count_fruitless(const Slot& slot);

  const SessionSetup& setup_;
  const Compared compared_;
  std::vector<uint32_t> part_of_;  // by sent route; kNone
  std::vector<Part> parts_;
  std::shared_ptr<const DeltaProgram> program_;
  SharedBuffer bases_;
  std::unique_ptr<SparseMemory> pieces_;
  uint64_t base_bytes_ = 0;
  uint64_t slot_bytes_ = 0;
  LoopSignal done_;
  std::vector<Slot> slots_;

  bool busy_ = false;
  uint32_t slot_ = 0;     // the last slot that was started
  Stamp last_stamp_ = 0;  // the last stamp that was given
  Stamp base_stamp_ = 0;  // of the contents of bases_; 0: incomplete
  uint32_t epoch_ = 0;
  int fruitless_ = 0;
};

}  // namespace tessera::bus
