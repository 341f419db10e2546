// The serving end of a connection to one rank that reads from this one. On the loop's thread.
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
#include "codec/simd/digest_sample.h"
#include "exec/digests.h"
#include "exec/sampled_routes.h"
#include "peer/agent.h"
#include "peer/exchange/source_end.h"
#include "peer/loop_signal.h"

namespace tessera::bus {

class SourceLink;

// The batch that a source link serves; the link reports to it. Called on the loop's thread.
class SourceLinkOwner {
 public:
  virtual ~SourceLinkOwner() = default;
  virtual void on_source_ready(SourceLink& link) = 0;
  // The peer asks to keep `version`. The owner answers immediately with keep() or refuse().
  virtual void on_hold(SourceLink& link, int64_t version, uint32_t epoch) = 0;
  virtual void on_released(SourceLink& link) = 0;  // the version need not be kept any more
  // The peer asks to read `version`. The owner answers immediately with grant() or refuse(). Not called while its
  // stream is being filled.
  virtual void on_take(SourceLink& link, const Take& take) = 0;
  virtual void on_progress(SourceLink& link) = 0;  // more bytes than before
  virtual void on_done(SourceLink& link, const Done& done) = 0;
  // The run that fills the stream has ended (with or without success).
  virtual void on_source_run_done(SourceLink& link) = 0;
  // Another rank of this job offers `version`, which is newer than what this one offers to the peer.
  virtual void on_ahead(SourceLink& link, int64_t version) = 0;
  // The peer closed the batch, was lost, or reports that another was. The link is closed unless `broken`.
  virtual void on_source_detached(SourceLink& link, const Status& reason) = 0;
  virtual void on_source_lost(SourceLink& link, const Status& status) = 0;
  virtual void on_source_broken(SourceLink& link, const Status& status) = 0;
};

// Of what is read through it.
struct SourceLinkDigest {
  bool on = true;
  SampleSeed sample = {};  // of the session, if they are sampled
};

class SourceLink {
 public:
  SourceLink(Agent& agent, RunFactory& factory, SourceLinkOwner& owner, Caller caller, std::vector<ServedRoute> routes,
             uint32_t slots, const SourceLinkDigest& digest);
  ~SourceLink();

  Rank rank() const { return rank_; }
  const std::string& name() const { return link_->name(); }
  bool open() const { return link_ && link_->open(); }
  Link* connection() const { return link_.get(); }
  bool left() const { return left_; }  // the peer has closed the batch normally
  bool ready() const { return exchange_.ready(); }
  bool streams() const { return exchange_.streams(); }
  // Whether the run that packs the stream also computes digests; otherwise they are computed separately.
  bool digests_itself() const { return streams() && !keeps(); }
  std::span<const ServedRoute> routes() const { return exchange_.routes(); }
  int64_t bytes() const { return exchange_.bytes(); }
  // What the last Grant lets travel as deltas, and the size that it stands for.
  const DeltaBytes& deltas() const { return deltas_; }
  int64_t granted_bytes() const { return bytes() - deltas_.full + deltas_.read; }

  // It may still read what it was granted last once this link has ended: see Take.
  bool leased() const { return leased_ && taking_ != 0; }
  uint32_t slot() const { return fill_.slot; }  // of that
  const Incarnation& process() const { return exchange_.peer().process; }
  int64_t taking() const { return taking_; }  // the version that was granted and is not done yet; 0 if none
  int64_t done_version() const { return done_version_; }
  int64_t ended_version() const { return ended_version_; }  // that is done, with or without success
  int64_t progress() const { return progress_.load(); }     // bytes of that version, as the peer reports; any thread
  bool running() const { return fill_.running; }            // its stream is being filled
  Run* run() const { return fill_.run; }
  // The digests for send_digests(), at the indices of table().
  std::span<Digest> digests() { return digests_.all; }
  const DigestTable& table() const { return digests_.table; }
  // Sets them to those of the stream's last run, zero where the receiver skips a route, and returns those of the
  // routes; empty without digests. Those of quantised routes stay as they are.
  std::span<const Digest> run_digests();

  void offer(int64_t version, uint32_t slot);
  void withdraw(int64_t version);
  void keep(int64_t version, uint32_t epoch);
  // `deltas`: see Grant; empty, or one for each route.
  void grant(int64_t version, uint32_t epoch, Stamp stamp, std::span<const int64_t> deltas);
  void refuse(int64_t version, uint32_t epoch, const Status& reason);
  void revoke(const Status& reason);  // asks it to stop reading; its Done follows
  void send_digests(int64_t version);
  void abort_run(const Status& status);
  void detach(const Status& why);

 private:
  // Staged: a version that is done may be taken once more, if not all ranks could take it.
  bool keeps() const { return exchange_.slots() > 1; }
  void forget_end_of(int64_t version);
  void handle(Frame& frame);
  void handle_take(const Take& take);
  void handle_done(const Done& done);
  void travel(std::span<const int64_t> deltas);
  void start_fill(uint32_t epoch);
  void fill_again();
  void handle_run_done();

  // The digests that the peer is sent; kept, so that a transfer allocates nothing.
  struct SentDigests {
    DigestTable table;
    std::vector<Digest> all;  // at the table's indices
    SampledRoutes sampled;
    Digests message;    // those that are in the sample
    bool sent = false;  // since grant()
  };
  // The run that fills the stream, if the link has one.
  struct Fill {
    uint32_t slot = 0;              // of what was granted last
    Run* run = nullptr;             // of that slot
    std::vector<int64_t> versions;  // by slot
    std::vector<int64_t> travel;    // SourceRun::travel()
    bool second = false;            // everything is to be packed again, in full, when the run has ended
    bool running = false;           // until the loop has been told of its end
  };

  SourceLinkOwner& owner_;
  std::shared_ptr<Link> link_;
  const Rank rank_;
  const SampleSeed sample_;
  LoopSignal run_done_;
  SourceEnd exchange_;
  SentDigests digests_;
  Grant grant_;  // likewise kept
  DeltaBytes deltas_;
  bool left_ = false;
  int64_t taking_ = 0;
  bool leased_ = false;  // as the last Take asked
  uint32_t epoch_ = 0;   // of the last Take
  int64_t done_version_ = 0;
  int64_t ended_version_ = 0;
  std::atomic<int64_t> progress_{0};
  Fill fill_;
  std::optional<Take> waiting_take_;  // until a fill has ended
};

}  // namespace tessera::bus
