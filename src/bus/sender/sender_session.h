// The sending side of a session: one receiving job, the ranks of this one that take part in reductions, and what is
// offered to them (offered_version.h).
//
// The job's rank 0 asks all senders to hold a version before it has its ranks take it: that version, or the one that
// they are at, is held.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bus/prepare/preparation.h"
#include "bus/sender/offer_digests.h"
#include "bus/sender/offered_terms.h"
#include "bus/sender/offered_version.h"
#include "bus/sender/receiver_links.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"
#include "tessera/bus.h"

namespace tessera::bus {

class SenderBatch;

class SenderSession final : public Session, public SourceLinkOwner {
 public:
  // REQUIRES: the batch outlives it
  SenderSession(SessionSetup setup, SenderBatch& batch);
  ~SenderSession() override = default;

  void accept(Caller caller) override;
  bool idle() const override;
  RankShare share() const override;

  // What is offered in a slot; in place there is one.
  OfferedVersion& offered(uint32_t slot = 0) { return *versions_[slot]; }
  const OfferedVersion& offered(uint32_t slot = 0) const { return *versions_[slot]; }
  const OfferedVersion& latest() const { return *latest_; }  // of all slots, the one that was offered or prepared last
  bool offering() const { return latest_->under_way(); }
  void fail_offer(const Status& status) { latest_->fail(status); }
  // What is read is prepared first: reduced, quantised or compared with the version before.
  bool prepares() const { return must_prepare() || preparation_.deltas() != nullptr; }
  // A slot that is not prepared cannot be offered. (Without deltas it can.)
  bool must_prepare() const;
  // The ranks of this job have sent versions up to this one before it was adopted, and quantise none of them for it.
  void passed(int64_t version) { preparation_.passed(version); }
  // The batch closes: nothing is on offer any more, and who reads is asked to stop. The batch hears of it once the
  // session is idle.
  void leave(const Status& why);

  void check_receivers();              // treats those that are stopped as lost
  bool left() const { return left_; }  // it is broken because a rank has closed the batch, as it should
  bool begun(int64_t version) const;   // a receiver reads it, or has read it
  bool held(int64_t version) const { return version != 0 && held_ == version; }
  // Nobody can say yet whether it will be read: rank 0 of the receivers holds it, or (in place) it is being reduced.
  bool undecided(int64_t version) const;
  TimePoint last_activity() const { return last_activity_; }
  Progress sample() const { return progress(receivers_); }
  // By tensor, of the last version; each sent route once.
  void sum_digests(std::vector<Digest>& sums) { digests_.sum(receivers_, sums); }

  // --- for what is offered ---
  const ReceiverLinks& receivers() const { return receivers_; }
  OfferedTerms& terms() { return terms_; }
  Preparation& preparation() { return preparation_; }
  OfferDigests& digests() { return digests_; }
  std::string subject() const { return describe(); }  // "batch policy of pair weights"
  LogScope log_scope() const { return tessera::log_scope(identity(), setup_.view.name, setup_.batch); }
  void begin_offer(OfferedVersion& version);
  Status not_sent(int64_t version, const Status& why) const;  // as this rank's send() tells it
  bool reading() const { return bus::reading(receivers_) || terms_.reading(); }
  static constexpr Duration kReadGrace = seconds(5);  // for readers to stop when they are asked to
  void bound_reading(Duration grace);                 // who has to stop reading is cut off after that time
  void end_reading();                                 // nobody has to stop any more
  void let_go(int64_t version);                       // it is not held any more
  void check_taken();  // whether all that are still there have what is held: then it is let go
  void check_ended();  // whether what is under way is over, and the session
  bool offers_terms(int64_t version) const { return version != 0 && version == latest_->version() && readable(); }
  Status why_gone(int64_t version) const;  // as others hear it
  void attached_one();                     // a receiver, an owner, or a peer of a reduction
  void note_activity() { last_activity_ = Clock::steady().now(); }
  void note_reading();
  void note_unpinned();
  void note_own_ahead(int64_t version);       // another rank of this job offers that version
  void check_stream(const SourceLink& link);  // the run that fills it has ended
  void end_link(SourceLink& link, const Status& why, bool left);
  void hear_broken(const SourceLink& link, const Status& status);

 private:
  void connect() override;
  std::vector<Linked> linked() const override;
  std::string leader() const override { return rank_name(setup_.view.peer_job, 0); }
  std::vector<Link*> links() const override;
  std::vector<Link*> awaited_links() const override;
  void detach_all(const Status& why) override;
  void on_broken(const Status& latest) override;

  // Of receivers.
  void on_source_ready(SourceLink& link) override;
  void on_hold(SourceLink& link, int64_t version, uint32_t epoch) override;
  void on_released(SourceLink& link) override;
  void on_take(SourceLink& link, const Take& take) override;
  void on_progress(SourceLink&) override { note_activity(); }
  void on_done(SourceLink& link, const Done& done) override;
  void on_source_run_done(SourceLink& link) override;
  void on_ahead(SourceLink& link, int64_t version) override;
  void on_source_detached(SourceLink& link, const Status& reason) override { end_link(link, reason, link.left()); }
  void on_source_lost(SourceLink& link, const Status& status) override;
  void on_source_broken(SourceLink& link, const Status& status) override { hear_broken(link, status); }

  void accept_receiver(Caller caller);
  void accept_amaxes(Caller caller);
  bool readable() const { return latest_->under_way() && !latest_->failing(); }
  OfferedVersion* with(int64_t version);  // null if no slot has it
  void grant(SourceLink& link, const Take& take, uint32_t slot);
  void on_digests(uint32_t slot);
  bool was_asked_to_stop(const SourceLink& receiver);
  void cut_off(SourceLink& link);
  void cut_off_readers();
  void cut_lease(const SourceLink& link);

  SenderBatch& batch_;
  ReceiverLinks receivers_;
  OfferedTerms terms_;
  Preparation preparation_;
  OfferDigests digests_;
  std::vector<std::unique_ptr<OfferedVersion>> versions_;  // by slot
  OfferedVersion* latest_ = nullptr;
  int64_t held_ = 0;  // 0: none
  int64_t rank_bytes_ = 0;
  bool left_ = false;
  Status leaving_;               // why, once leave() was called
  std::vector<int64_t> deltas_;  // of a Grant
  TimePoint last_activity_{};
  EventLoop::TimerId cut_timer_ = 0;
};

}  // namespace tessera::bus
