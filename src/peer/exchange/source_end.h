// The end of a connection that is pulled from. It tells where its memory lies, and makes the runs that fill a stream,
// if the other end wants one.
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
class SourceEnd {
 public:
  // `digest`: the runs digest what they pack. `done` is passed to the runs. `factory` must outlive this.
  SourceEnd(RunFactory& factory, const Endpoint& peer, std::vector<ServedRoute> routes, uint32_t slots, bool digest,
            RunDone done);

  // To be called first. Sends Attached, in as many messages as needed. Throws what Exporter::add() does.
  void attach(Link& link);
  // Answers Prepare with Prepared. Throws Error(kMismatch) for a Prepare that is out of turn or does not fit the
  // routes, and what RunFactory throws.
  void handle_prepare(Link& link, const Frame& frame);

  const Endpoint& peer() const { return peer_; }
  bool ready() const { return ready_; }  // Prepared was sent
  bool streams() const { return runs_ != nullptr; }
  uint32_t slots() const { return slots_; }
  std::span<const ServedRoute> routes() const { return routes_; }
  bool skips(size_t route) const;                            // whether the other end skips it
  int64_t bytes() const { return bytes_; }                   // of the routes that the other end does not skip
  static int64_t bytes_of_route(const ServedRoute& served);  // in full
  // The routes of the runs, as positions in routes().
  std::span<const uint32_t> in_runs() const { return in_runs_; }

  // REQUIRES: streams()
  Run& run(size_t slot) const { return runs_->run(slot); }
  void travel(size_t slot, std::span<const int64_t> deltas) const { runs_->travel(slot, deltas); }

 private:
  Exporter::Exported exported(const ServedRoute& served) const;
  Exporter::Exported exported_delta(const ServedRoute& served) const;
  Attached::Place place_of(const ServedRoute& served) const;
  std::vector<SourceRoute> routes_in(uint32_t slot) const;
  StreamEnd make_runs();

  RunFactory& factory_;
  const Endpoint peer_;
  const std::unique_ptr<Exporter> exporter_;
  const std::vector<ServedRoute> routes_;
  const uint32_t slots_;
  const bool digest_;
  const RunDone done_;
  std::vector<uint32_t> skipped_;  // ascending
  int64_t bytes_ = 0;
  std::vector<uint32_t> in_runs_;
  std::unique_ptr<SourceRuns> runs_;  // null: the other end wants no stream
  bool ready_ = false;
};

}  // namespace tessera
