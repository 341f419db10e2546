// The digests of what is on offer, slot by slot: of plain routes each is computed once, whoever takes it, by a run of
// this rank's; of what travels quantised or is compared they come from where that was done. Receivers with a stream
// have theirs computed as it is filled.
//
// On the loop's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bus/prepare/preparation.h"
#include "bus/sender/receiver_links.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"
#include "exec/run.h"
#include "peer/loop_signal.h"

namespace tessera::bus {

class OfferDigests {
 public:
  using SourceOf = std::function<SourceRoute(uint32_t sent, uint32_t slot)>;
  // A run that was begun has ended, well or not.
  using Done = std::function<void(uint32_t slot)>;

  // REQUIRES: that the first two outlive it
  OfferDigests(const SessionSetup& setup, const Preparation& preparation, Done done);

  // Once all receivers are attached; again and again, it is built once. No-op without digests.
  void build(const ReceiverLinks& receivers, const SourceOf& source_of);

  // A version is on offer in the slot: its run begins, unless its digests are there. `compared`: by the preparation.
  // Whether they are there.
  bool begin(uint32_t slot, int64_t version, bool compared);
  void abort(uint32_t slot, const Status& status);  // done() follows, if it runs
  bool running(uint32_t slot) const { return slots_[slot].running; }
  bool any_running() const;
  bool ready(uint32_t slot) const { return slots_[slot].ready; }
  bool compared(uint32_t slot) const { return slots_[slot].compared; }

  // To one that takes `version` from that slot; where it has a stream, send_streamed() does.
  void send(SourceLink& link, uint32_t slot, int64_t version) const;
  // What its stream's run has computed, and of `slot` what no run does. null: of no slot any more.
  void send_streamed(SourceLink& link, const uint32_t* slot, int64_t version) const;
  // By tensor, of the version whose digests came last; each sent route once: from the shared run, else from the first
  // stream that carried it.
  void sum(const ReceiverLinks& receivers, std::vector<Digest>& sums);

 private:
  struct Slot {
    std::unique_ptr<LoopSignal> done;
    std::unique_ptr<Run> run;
    bool running = false;
    bool ready = false;
    bool compared = false;  // its digests are the preparation's, except for what is quantised
  };

  void on_run_done(uint32_t slot);
  std::span<const LinkRoute> routes_to(const SourceLink& link) const;
  void fill_plain(SourceLink& link, uint32_t slot) const;
  void fill_quantised(SourceLink& link, uint32_t slot) const;
  void fill_compared(SourceLink& link, uint32_t slot) const;

  const SessionSetup& setup_;
  const Preparation& preparation_;
  const Done done_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> in_run_;        // indices into routes.sent, in the programs' order
  std::vector<uint32_t> place_in_run_;  // by such an index, of those that are
  std::vector<bool> counted_;           // by sent route, while digests are summed
  uint32_t newest_slot_ = 0;            // whose digests came last
  uint32_t runs_ = 0;                   // begun so far
};

}  // namespace tessera::bus
