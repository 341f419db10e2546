// The end of a connection that pulls. It learns where the source's memory lies, and has the runs that pull from there
// made ready. Its owner passes it the frames of the exchange (messages.h) in the order in which they arrive.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/framing.h"
#include "exec/run_factory.h"
#include "peer/exchange/messages.h"
#include "peer/exchange/routes.h"
#include "peer/link.h"

namespace tessera {

// On the loop's thread.
class PullEnd {
 public:
  struct Options {
    bool digest = true;
    bool deltas = false;  // routes that are not quantised may travel as deltas: their places name a piece
    bool runs = true;     // false: the owner makes its own run of program(), which drains stream()
  };
  // `done` is passed to the runs. `factory` must outlive this.
  PullEnd(RunFactory& factory, Endpoint peer, std::vector<WantedRoute> routes, const Options& options, RunDone done);

  // Answers the last Attached with Prepare. Both throw Error(kMismatch) for a message that is out of turn or does not
  // fit the routes, and whatever RunFactory and PullRuns throw.
  void handle_attached(Link& link, Frame& frame);
  void handle_prepared(Frame& frame);

  bool ready() const { return ready_; }  // Prepared has come
  const Endpoint& peer() const { return peer_; }
  std::span<const WantedRoute> routes() const { return routes_; }
  bool deltas() const { return options_.deltas; }
  bool has_delta(size_t route) const { return options_.deltas && !routes_[route].route.wire; }
  // The routes that are not skipped, as positions in routes(). A program has them in this order.
  std::span<const uint32_t> pulled() const { return pulled_; }

  // For the first slot; null before the source has said where its memory lies.
  const std::shared_ptr<const PullProgram>& program() const;
  bool streams() const { return program() && program()->wants_stream(); }
  int64_t bytes() const { return program() ? program()->bytes() : 0; }
  // REQUIRES: ready(); so do the functions below
  size_t slots() const { return slots_; }
  std::shared_ptr<ByteStream> stream() const { return stream_; }  // without Options::runs; null: none is wanted
  // REQUIRES: Options::runs
  Run& run(size_t slot) const { return runs_->run(slot); }
  // Whether everything that is pulled could go straight to the registered tensors, at any time until the source
  // overwrites it: the source has several slots, all of them are mapped, and this process sees whether it is alive.
  bool direct() const { return direct_; }
  // The run that does so. REQUIRES: direct(), and Options::runs
  Run& direct_run(size_t slot, Pass pass) const {
    runs_->pass(slots_ + slot, pass);
    return runs_->run(slots_ + slot);
  }
  void travel(size_t slot, std::span<const Travel> routes, std::span<const int64_t> delta_bytes) const {
    runs_->travel(slot, routes, delta_bytes);
  }

 private:
  // The distance from one slot to the next, for a route.
  struct SlotBytes {
    uint64_t memory = 0;
    uint64_t delta = 0;
  };
  const Attached::Place& check_place(const Attached& attached, size_t place, size_t route) const;
  std::vector<PullRoute> place_routes(const Attached& attached, std::vector<SlotBytes>& slot_bytes) const;
  void build(const Attached& attached);
  void add_slots(PullRuns& runs, std::span<const PullRoute> first, std::span<const SlotBytes> slot_bytes) const;

  RunFactory& factory_;
  const Endpoint peer_;
  const std::vector<WantedRoute> routes_;
  std::vector<uint32_t> pulled_;
  const Options options_;
  const RunDone done_;
  std::vector<RemoteKey> keys_;  // collected until the last ones have arrived
  std::unique_ptr<PullRuns> runs_;
  std::shared_ptr<ByteStream> stream_;
  size_t slots_ = 0;
  bool direct_ = false;
  bool ready_ = false;
};

}  // namespace tessera
