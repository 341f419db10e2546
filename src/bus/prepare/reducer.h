// Reduces the Partial tensors of a batch before they are offered: for the regions that it owns, this rank pulls the
// terms from every rank of its job that holds one, itself included, and stores the result in scratch memory for
// receivers to read.
//
// On the loop's thread. docs/formats/bus-protocol.md, "Reductions".
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bus/prepare/step.h"
#include "bus/session/pull_link.h"
#include "bus/session/session.h"
#include "exec/run_factory.h"
#include "peer/loop_signal.h"
#include "tessera/memory.h"

namespace tessera::bus {

class Reducer final : public PullLinkOwner, public PreparationStep {
 public:
  struct Events {
    std::function<void()> ready_changed;
    std::function<void(const Status&)> lost;     // a peer was lost, or reports that another was
    std::function<void(const Status&)> reduced;  // the run that start() began has ended
    // A rank of this job offers the terms of a newer version than that of start(), perhaps before start() returns.
    std::function<void(int64_t version)> ahead;
  };
  // Allocates scratch memory. Everything else happens on the loop's thread.
  Reducer(Agent& agent, const SessionSetup& setup, Events events);
  ~Reducer() override;

  void connect();  // call it first
  const std::vector<std::unique_ptr<PullLink>>& links() const { return links_; }
  bool ready() const;
  // Where the result of reduction `index` of the batch's routes is stored; contiguous.
  const std::byte* result(size_t index) const { return targets_[index].result; }
  uint64_t slot_bytes() const { return slot_bytes_; }  // from the results of one slot to those of the next

  // Reduces `version` into a slot as soon as every peer offers it.
  void start(int64_t version, uint32_t slot) override;
  // reduced() follows if a version is under way.
  void abort(const Status& status) override;
  bool busy() const override { return round_.version != 0; }
  std::string missing() const override;
  std::string awaited(int64_t version) const override;
  std::vector<std::string> waiting_for() const;  // peers that have not offered the version under way
  void detach(const Status& why);

 private:
  void on_pull_ready(PullLink& link) override;
  void on_offer(PullLink& link) override;
  void on_granted(PullLink& link) override;
  void on_pulled(PullLink& link, const Status& status) override;
  void on_aborted(PullLink& link, const Status& status) override;
  void on_pull_detached(PullLink& link, const Status& reason) override;
  void on_pull_lost(PullLink& link, const Status& status) override;
  void on_pull_broken(PullLink& link, const Status& status) override;

  PullRoute route_into(size_t reduction, Rank peer) const;
  void build_run();
  void compare();    // tells who is behind, itself or a peer
  void ask();        // asks the peers for their memory, once all offer the version
  void start_run();  // once they have granted it
  void begin_own();
  void check_run();
  void finish(const Status& status);

  Agent& agent_;
  const SessionSetup& setup_;
  const Events events_;
  SharedBuffer results_;
  uint64_t slot_bytes_ = 0;
  std::vector<std::byte> accumulators_;
  std::vector<ReductionTarget> targets_;                   // one for each reduction
  std::vector<std::unique_ptr<PullLink>> links_;           // other ranks, ascending
  std::vector<std::unique_ptr<LoopSignal>> take_signals_;  // one for each link with a stream: its step begins
  LoopSignal run_done_, own_done_, own_begins_;
  std::unique_ptr<Run> own_terms_;  // fills a stream with this rank's own terms; null if they are read in place
  bool own_running_ = false;        // until the loop has been told of its end
  std::unique_ptr<ReduceRun> run_;
  // The current version, or the last one.
  struct Round {
    int64_t version = 0;  // 0: none
    uint32_t slot = 0;
    uint32_t epoch = 0;
    bool asked = false;    // the peers have been asked for their memory
    bool running = false;  // run_ has been started
    bool run_ended = false;
  };
  Round round_;
};

}  // namespace tessera::bus
