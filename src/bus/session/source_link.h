// The serving end of a connection: one rank that reads from this one. On the loop's thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bus/registration/batch_routes.h"
#include "bus/registration/local_tensors.h"
#include "bus/session/versions.h"
#include "exec/digests.h"
#include "exec/run_factory.h"
#include "peer/agent.h"
#include "peer/exchange/messages.h"
#include "peer/loop_signal.h"

namespace tessera::bus {

class SourceLink;

// What a source link reports to the batch it serves. Called on the loop's thread.
class SourceLinkOwner {
 public:
  virtual ~SourceLinkOwner() = default;
  virtual void on_source_ready(SourceLink& link) = 0;
  // It asks to have `version` kept. The owner answers with keep() or refuse(), now.
  virtual void on_hold(SourceLink& link, int64_t version, uint32_t epoch) = 0;
  virtual void on_released(SourceLink& link) = 0;  // what was kept need not be any more
  // It asks to read `version`. The owner answers with grant() or refuse(), now. Not while its stream is being filled.
  virtual void on_take(SourceLink& link, const Take& take) = 0;
  virtual void on_progress(SourceLink& link) = 0;  // more bytes than before
  virtual void on_done(SourceLink& link, const Done& done) = 0;
  // The stream's run has ended (well or not).
  virtual void on_source_run_done(SourceLink& link) = 0;
  // The peer closed the batch, or was lost, or passes on that another was. The link is closed but for `broken`.
  virtual void on_source_detached(SourceLink& link, const Status& reason) = 0;
  virtual void on_source_lost(SourceLink& link, const Status& status) = 0;
  virtual void on_source_broken(SourceLink& link, const Status& status) = 0;
};

// What a route's source looks like in this rank's memory.
struct ServedRoute {
  SourceRoute route;
  bool per_route = false;   // its place is this route's own (reduced), not the tensor's
  bool quantised = false;   // it is a wire piece: its digests are the owner's to give
  uint64_t slot_bytes = 0;  // slot s lies s times as far behind
  // If it may travel as a delta: its piece, in shared memory.
  const std::byte* delta = nullptr;
  size_t delta_bytes = 0;
  uint64_t delta_slot_bytes = 0;
  bool delta_digest = false;  // the piece has a digest of its own
};

// sizes: members, the state of one connection, from its handshake to the digests of its last grant
class SourceLink {
 public:
  SourceLink(Agent& agent, RunFactory& factory, SourceLinkOwner& owner, Caller caller, std::vector<ServedRoute> routes,
             uint32_t slots, bool digest);
  ~SourceLink();

  Rank rank() const { return rank_; }
  const std::string& name() const { return name_; }
  bool open() const { return link_ && link_->open(); }
  Link* connection() const { return link_.get(); }
  bool left() const { return left_; }  // the peer has closed the batch, as it should
  bool ready() const { return ready_; }
  bool streams() const { return runs_ != nullptr; }
  // Whether the digests of what it sends come from the run that packs it: else they are made beside it.
  bool digests_itself() const { return streams() && !keeps_; }
  std::span<const ServedRoute> routes() const { return routes_; }
  int64_t bytes() const { return bytes_; }
  // What it was granted last: as deltas, and what they stand for.
  const DeltaBytes& deltas() const { return deltas_; }
  int64_t granted_bytes() const { return bytes_ - deltas_.full + deltas_.read; }

  int64_t taking() const { return taking_; }  // the version it was granted and is not done with; 0 if none
  int64_t done_version() const { return done_version_; }
  int64_t ended_version() const { return ended_version_; }  // that it is done with, well or not
  int64_t progress() const { return progress_.load(); }     // bytes of that version, as it reports; any thread
  bool running() const { return running_; }                 // its stream is being filled
  Run* run() const { return run_; }
  // What send_digests() sends, where table() says.
  std::span<Digest> digests() { return digests_.digests; }
  const DigestTable& table() const { return table_; }
  // Makes them those of the stream's last run, zero where the receiver skips a route, and gives those of the routes;
  // empty without. Of quantised ones they stay as they are.
  std::span<const Digest> run_digests();

  void offer(int64_t version, uint32_t slot);
  void withdraw(int64_t version);
  void keep(int64_t version, uint32_t epoch);
  // `deltas`: see Grant; empty, or one a route.
  void grant(int64_t version, uint32_t epoch, Stamp stamp, std::span<const int64_t> deltas);
  void refuse(int64_t version, uint32_t epoch, const Status& reason);
  void revoke(const Status& reason);  // asks it to stop reading; its Done follows
  void send_digests(int64_t version);
  void abort_run(const Status& status);
  void detach(const Status& why);

 private:
  void forget_end_of(int64_t version);
  bool skips(size_t route) const;  // the receiver does
  void handle(Frame& frame);
  Attached::Place place_of(const ServedRoute& served);
  Exporter::Exported exported(const SourceRoute& route, const ByteExtent& extent);
  Exporter::Exported exported_delta(const ServedRoute& served);
  void send_places(uint32_t slots);
  void send_keys(Attached message, std::vector<RemoteKey> keys);
  void prepare(const Prepare& prepare);
  StreamEnd make_runs();
  std::vector<SourceRoute> routes_in(uint32_t slot);
  void travel(std::span<const int64_t> deltas);
  void fill_again();
  void handle_run_done();

  RunFactory& factory_;
  SourceLinkOwner& owner_;
  std::shared_ptr<Link> link_;
  const Rank rank_;
  const Incarnation incarnation_;
  const std::string name_;
  const std::unique_ptr<Exporter> exporter_;
  std::vector<ServedRoute> routes_;
  const bool digest_;
  const uint32_t slots_;
  const bool keeps_;  // staged: what is done may be taken once more, if not all could take it
  DigestTable table_;
  Digests digests_;  // kept, so that a transfer takes nothing from the heap
  Grant grant_;      // likewise
  std::vector<uint32_t> skipped_;
  int64_t bytes_ = 0;
  DeltaBytes deltas_;
  bool ready_ = false;
  bool left_ = false;
  int64_t taking_ = 0;
  uint32_t epoch_ = 0;  // of the last Take
  int64_t done_version_ = 0;
  int64_t ended_version_ = 0;
  std::atomic<int64_t> progress_{0};
  // With a stream only.
  std::vector<uint32_t> program_routes_;  // positions of those in the programs
  LoopSignal run_done_;
  std::unique_ptr<SourceRuns> runs_;
  uint32_t run_slot_ = 0;             // of the present run, or the last
  Run* run_ = nullptr;                // that one
  std::vector<int64_t> in_slot_;      // versions, by slot
  std::vector<int64_t> travel_;       // SourceRun::travel()
  bool told_ = false;                 // its digests, since grant()
  bool again_ = false;                // it is to be packed once more, in full, when the run has ended
  bool running_ = false;              // until the loop has heard of the end
  std::optional<Take> waiting_take_;  // until then
};

}  // namespace tessera::bus
