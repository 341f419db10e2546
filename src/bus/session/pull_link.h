// The reading end of a connection to one rank that this one pulls from. On the loop's thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/trace.h"
#include "bus/registration/batch_routes.h"
#include "bus/registration/local_tensors.h"
#include "bus/registration/records.h"
#include "bus/session/pull_deltas.h"
#include "bus/session/pull_digests.h"
#include "bus/session/versions.h"
#include "codec/simd/digest_sample.h"
#include "exec/run_factory.h"
#include "peer/agent.h"
#include "peer/exchange/pull_end.h"
#include "peer/loop_signal.h"

namespace tessera::bus {

class PullLink;

// The batch that a pull link fills; the link reports to it. Called on the loop's thread.
class PullLinkOwner {
 public:
  virtual ~PullLinkOwner() = default;
  virtual void on_pull_ready(PullLink& link) = 0;
  virtual void on_offer(PullLink& link) = 0;                    // offered() has changed
  virtual void on_withdrawn(PullLink&, int64_t /*version*/) {}  // before on_offer(), if it was offered
  virtual void on_held(PullLink&, bool) {}                      // whether the source keeps what hold() asked for
  virtual void on_granted(PullLink& link) = 0;                  // the source lets it read from now on
  // The pull has ended: all bytes of the version are there and their digests agree, or the status says why not.
  virtual void on_pulled(PullLink& link, const Status& status) = 0;
  // For an owner that makes its own run: it must stop reading, and call finish() once it has.
  virtual void on_aborted(PullLink&, const Status&) {}
  virtual void on_copied(PullLink&) {}  // what copy() began has ended
  virtual void on_pull_detached(PullLink& link, const Status& reason) = 0;
  virtual void on_pull_lost(PullLink& link, const Status& status) = 0;
  virtual void on_pull_broken(PullLink& link, const Status& status) = 0;
};

struct PullLinkOptions {
  bool digest = true;
  SampleSeed sample = {};                            // of the session, if digests are sampled
  std::function<std::string(uint32_t)> tensor_name;  // for messages
  bool runs = true;                                  // false: the batch makes its own run of the program (reductions)
  bool delta = false;                                // routes that are not quantised may travel as deltas
};

class PullLink {
 public:
  PullLink(Agent& agent, RunFactory& factory, PullLinkOwner& owner, const std::string& peer_job, Rank rank,
           const RankRecord& record, std::vector<WantedRoute> routes, PullLinkOptions options);
  ~PullLink();  // REQUIRES: not running

  // On the loop's thread, with the result of Agent::call().
  void adopt(std::shared_ptr<Link> link);

  Rank rank() const { return rank_; }
  const std::string& name() const { return exchange_.peer().name; }
  bool open() const { return link_ && link_->open(); }
  Link* connection() const { return link_.get(); }  // null before adopt()
  bool ready() const { return exchange_.ready(); }
  int64_t offered() const { return offers_.empty() ? 0 : offers_.back().version; }  // the newest one; 0: none
  bool offers(int64_t version) const;
  int64_t newest_below(int64_t version) const;  // that is offered; 0: none
  bool streams() const { return exchange_.streams(); }
  // For the first slot; null before the source has said where its memory is.
  const std::shared_ptr<const PullProgram>& program() const { return exchange_.program(); }
  std::shared_ptr<ByteStream> stream() const { return exchange_.stream(); }  // for a batch that makes its own run
  int64_t bytes() const { return exchange_.bytes(); }
  RankShare share() const;  // likewise
  // What the last Grant lets travel as deltas, and the size that it stands for.
  const DeltaBytes& deltas() const { return deltas_.read(); }
  int64_t granted_bytes() const { return bytes() - deltas().full + deltas().read; }
  int64_t bytes_done() const;

  // From take() to on_pulled(): the destination may be written.
  bool busy() const { return state_ != State::kIdle; }
  bool granted() const { return state_ == State::kPulling; }
  // Whether the pull of this version has succeeded.
  bool pulled(int64_t version) const { return pulled_ == version; }
  void forget_pulled() { pulled_ = 0; }

  // Asks the source to keep a version until take() or release(): on_held() follows, unless the link ends.
  void hold(int64_t version, uint32_t epoch);
  void release();
  bool holds() const { return hold_.state == HoldState::kHeld; }
  // With a `lease` nothing is written: on_pulled() tells whether the digests of what lies at the source agree. If they
  // do, it lies there, whole, until copy() has ended or until end_lease(), even if the source is lost meanwhile.
  // REQUIRES: with a lease, direct()
  void take(int64_t version, uint32_t epoch, bool lease = false);
  bool asked(uint32_t epoch) const { return epoch_ == epoch; }             // by take()
  bool direct() const { return exchange_.ready() && exchange_.direct(); }  // see PullEnd
  enum class Target { kRegistered, kStaged };
  void copy(Target target);              // on_copied() follows, at once where there is nothing to copy
  void end_lease(const Status& status);  // it is not copied. No-op without a lease
  bool leased() const { return lease_.lasts; }
  // For an owner that makes its own run: nothing reads any more. REQUIRES: busy(). on_pulled() follows.
  void finish(const Status& status);
  void send_done(int64_t version, const Status& status);
  void send_progress();
  // Tells the source that another rank of its job offers `version`, if what it offers is older, and is neither being
  // read nor held. With several slots only if `keeps_pace`: otherwise it need not offer the same. Once for each pair.
  void tell_ahead(int64_t version, bool keeps_pace);
  void abort(const Status& status);  // on_pulled() follows
  void send_broken(const Status& status);
  void detach(const Status& why);

  // Adds the last pull's digests to `sums`, one for each tensor of the batch. Only `counted` routes.
  void add_digests(std::span<Digest> sums) const;

 private:
  enum class HoldState { kNone, kAsked, kHeld };
  enum class State {
    kIdle,
    kAsked,     // Take is sent
    kPulling,   // the run is under way
    kChecking,  // the run is over; waits for the source's digests
    kCopying,   // copy()
  };
  void handle(Frame& frame);
  void handle_prepared(Frame& frame);
  void handle_offer(const Offer& offer);
  void withdraw_offer(int64_t version);
  void handle_held(const Held& held);
  void handle_grant(Grant grant);
  void pull_rest();
  void give_up_delta(size_t position);
  const PullRoute& route_at(size_t position) const { return exchange_.routes()[exchange_.pulled()[position]].route; }
  Status given_up(int64_t version, const Status& reason) const;
  void handle_refuse(const Refuse& refuse);
  void handle_revoke(const Revoke& revoke);
  void handle_digests(Digests digests);
  void handle_detach(const Detach& detach);
  void handle_run_done();
  void check_digests();
  void end_pull(const Status& status);
  void end_copy();
  void lose(const Status& status);

  PullLinkOwner& owner_;
  const Rank rank_;
  const std::optional<Incarnation> worker_;
  const PullLinkOptions options_;
  LoopSignal run_done_;
  PullEnd exchange_;
  std::shared_ptr<Link> link_;
  uint32_t slot_ = 0;   // of the current run, or the last one
  Run* run_ = nullptr;  // the same run
  struct Offered {
    int64_t version = 0;
    uint32_t slot = 0;
    int64_t ahead = 0;  // as the source was told, while this was its newest
  };
  std::vector<Offered> offers_;  // ascending versions; at most one for each slot
  struct Holding {
    HoldState state = HoldState::kNone;
    int64_t version = 0;
    uint32_t epoch = 0;
  };
  Holding hold_;
  struct Lease {
    bool asked = false;   // of the present pull, or the last
    bool lasts = false;   // its digests agree, and it is not over
    bool copied = false;  // it was copied, or is
  };
  State state_ = State::kIdle;
  Lease lease_;
  int64_t taking_ = 0;
  uint32_t epoch_ = 0;
  int64_t pulled_ = 0;
  PullDigests digests_;
  PullDeltas deltas_;
  Status abort_status_;
  const uint64_t track_ = Trace::new_track();
};

}  // namespace tessera::bus
