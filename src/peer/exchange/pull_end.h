// The end of a connection that pulls: hears where the source's memory lies, and has what is pulled from there made
// ready. It is told of the frames of the exchange (messages.h) in the order in which they come.
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
    bool runs = true;     // false: the owner makes a run of its own of program(), which drains stream()
  };
  // `done` is that of the runs. `factory` must outlive this.
  PullEnd(RunFactory& factory, Endpoint peer, std::vector<WantedRoute> routes, const Options& options, RunDone done);

  // Once the last Attached has come it is answered with Prepare. Both throw Error(kMismatch) for what is out of turn or
  // does not fit the routes, and what RunFactory and PullRuns throw.
  void handle_attached(Link& link, Frame& frame);
  void handle_prepared(Frame& frame);

  bool ready() const { return ready_; }  // Prepared has come
  const Endpoint& peer() const { return peer_; }
  std::span<const WantedRoute> routes() const { return routes_; }
  bool deltas() const { return options_.deltas; }
  bool has_delta(size_t route) const { return options_.deltas && !routes_[route].route.wire; }
  // Those that are not skipped, by position in routes(): so they lie in a program.
  std::span<const uint32_t> pulled() const { return pulled_; }

  // Of the first slot; null before the source has said where its memory is.
  const std::shared_ptr<const PullProgram>& program() const;
  bool streams() const { return program() && program()->wants_stream(); }
  int64_t bytes() const { return program() ? program()->bytes() : 0; }
  // REQUIRES: ready(), as what follows
  size_t slots() const { return slots_; }
  std::shared_ptr<ByteStream> stream() const { return stream_; }  // without Options::runs; null: none is wanted
  // REQUIRES: Options::runs
  Run& run(size_t slot) const { return runs_->run(slot); }
  // Whether all that is pulled could go straight to the registered tensors, at any time until the source writes over
  // it: it has several slots, everything in them is mapped, and its process is seen to live.
  bool direct() const { return direct_; }
  // The run that does. REQUIRES: direct(), and Options::runs
  Run& direct_run(size_t slot, Pass pass) const {
    runs_->pass(slots_ + slot, pass);
    return runs_->run(slots_ + slot);
  }
  void travel(size_t slot, std::span<const Travel> routes, std::span<const int64_t> delta_bytes) const {
    runs_->travel(slot, routes, delta_bytes);
  }

 private:
  // From one slot to the next, of a route.
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
  std::vector<RemoteKey> keys_;  // until the last of them has come
  std::unique_ptr<PullRuns> runs_;
  std::shared_ptr<ByteStream> stream_;
  size_t slots_ = 0;
  bool direct_ = false;
  bool ready_ = false;
};

}  // namespace tessera
