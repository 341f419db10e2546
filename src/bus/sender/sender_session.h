// The sending side of a session: one receiving job.
//
// A version is offered in a slot. In place there is one slot, which is the user's memory: it is the receivers' to read
// from offer() until on_offer_over().
//
//   idle --offer(v)--> preparing --all is there--> offered --every receiver done--> idle
//                          |                          |
//                          \------------------> failing: withdrawn; ends once nobody reads any more
//
// Preparing: prepare/preparation.h. Digests of what is on offer: offer_digests.h.
//
// Staged, a slot is a copy that stays on offer until it is wanted for a newer version: prepare() reduces into a slot
// that is not pinned, offer() offers it and is over at once. What pins a slot: a reader, rank 0 of the receivers while
// it decides, and then all ranks of its job until each of them has the version.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bus/prepare/preparation.h"
#include "bus/sender/offer_digests.h"
#include "bus/sender/receiver_links.h"
#include "bus/session/session.h"
#include "bus/session/source_link.h"
#include "tessera/bus.h"

namespace tessera::bus {

class SenderSession;

// Events of a session for the offering batch. Called on the loop's thread.
class SenderSessionOwner {
 public:
  virtual ~SenderSessionOwner() = default;
  virtual void on_taking(SenderSession& session) = 0;  // a receiver, or an owner of a reduction, begins to read
  // A receiver begins to read the version from a rank of this job, or may have: it was lost while it had it held.
  virtual void on_begun(int64_t version) = 0;
  // In place: nobody reads the version any more; every receiving rank has it, or why not.
  virtual void on_offer_over(SenderSession& session, const Status& status) = 0;
  // Staged: what prepare() began is over.
  virtual void on_prepared(SenderSession& session, const Status& status) = 0;
  virtual void on_taken(SenderSession& session, int64_t version) = 0;     // by all receiving ranks
  virtual void on_digested(SenderSession& session, int64_t version) = 0;  // staged: sum_digests() has those of it
  // Staged: a receiver that has the lease of that slot was lost, or cut off. Its process may still read.
  virtual void on_lease_cut(uint32_t slot, const Incarnation& process) = 0;
  virtual void on_receiver(const Incarnation& process) = 0;  // attaches: whatever it read before, it is done with
  // Another rank of this job offers `version`, which is newer than what this one offers; if it is `over`, nobody will
  // take an older one that is on offer here, unless they are at it already.
  virtual void on_ahead(int64_t version, bool over) = 0;
  virtual void on_unpinned(SenderSession& session) = 0;        // a slot, or what withdraw() waited for
  virtual void on_sender_retired(SenderSession& session) = 0;  // broken and idle: close and drop it, not at once
};

class SenderSession final : public Session, public SourceLinkOwner {
 public:
  SenderSession(SessionSetup setup, SenderSessionOwner& owner);
  ~SenderSession() override = default;

  void accept(Caller caller) override;
  bool idle() const override;
  RankShare share() const override;

  // In place. REQUIRES: idle(), adopted, not broken
  void offer(int64_t version) { prepare_offer(version, 0); }
  // Ends the offer with `status` once nobody reads any more.
  void fail_offer(const Status& status);
  bool offering() const { return phase_ != Phase::kIdle; }

  // Staged.
  bool pinned(uint32_t slot) const;
  void clear(uint32_t slot);  // nobody is offered it any more. REQUIRES: not pinned
  // on_prepared() follows, at once where nothing is to be prepared.
  void prepare(int64_t version, uint32_t slot) { prepare_offer(version, slot); }
  void offer_slot(int64_t version, uint32_t slot);  // prepared, if prepares()
  // What prepare() began waits for the slot's copy, too, where it is quantised or compared.
  void copied(const Status& status);
  bool prepares() const { return must_prepare() || preparation_.deltas() != nullptr; }
  // A slot that is not prepared cannot be offered. (Without deltas it can.)
  bool must_prepare() const { return preparation_.reducer() || !owners_.empty() || preparation_.quantizer(); }

  // The ranks of this job have sent versions up to this one before it was adopted, and quantise none of them for it.
  void passed(int64_t version) { preparation_.passed(version); }

  // Staged: nothing is on offer any more, and who reads is asked to stop; on_unpinned() is called once it is idle.
  void leave(const Status& why);

  bool left() const { return left_; }  // it is broken because a rank has closed the batch, as it should
  bool begun(int64_t version) const;   // a receiver reads it, or has read it
  bool held(int64_t version) const { return held_ == version; }  // likewise, or rank 0 of the receivers may choose it
  // Nobody can say yet whether it will be read: rank 0 of the receivers holds it, or (in place) it is being reduced.
  bool undecided(int64_t version) const;
  // In place: whether all receivers are at it and one was heard of since then.
  bool flows_since(TimePoint then) const;
  TimePoint last_activity() const { return last_activity_; }
  std::string who_has_not_taken() const;
  std::string awaited() const;  // "inference/1 to take version 7"; of the offer under way
  Progress sample() const { return progress(receivers_); }
  // By tensor, of the last version; each sent route once.
  void sum_digests(std::vector<Digest>& sums) { digests_.sum(receivers_, sums); }

 private:
  enum class Phase { kIdle, kPreparing, kOffered, kFailing };

  void connect() override;
  std::vector<Linked> linked() const override;
  std::string leader() const override { return rank_name(setup_.view.peer_job, 0); }
  std::vector<Link*> links() const override;
  std::vector<Link*> awaited_links() const override;
  void detach_all(const Status& why) override;
  void on_broken(const Status& latest) override;

  void on_source_ready(SourceLink& link) override;
  void on_hold(SourceLink& link, int64_t version, uint32_t epoch) override;
  void on_released(SourceLink& link) override;
  void on_take(SourceLink& link, const Take& take) override;
  void on_done(SourceLink& link, const Done& done) override;
  void on_progress(SourceLink& link) override;
  void on_ahead(SourceLink& link, int64_t version) override;
  void on_source_run_done(SourceLink& link) override;
  void on_source_detached(SourceLink& link, const Status& reason) override;
  void on_source_lost(SourceLink& link, const Status& status) override;
  void on_source_broken(SourceLink& link, const Status& status) override;

  bool staged() const { return setup_.slots > 1; }
  bool is_receiver(const SourceLink& link) const;
  std::optional<uint32_t> slot_of(int64_t version) const;  // that it is on offer in
  bool reading() const { return bus::reading(receivers_) || bus::reading(owners_); }
  Status why_withdrawn() const;
  void attached_one();  // a receiver, an owner, or a peer of a reduction
  void prepare_offer(int64_t version, uint32_t slot);
  void on_prepared();
  void grant(SourceLink& link, const Take& take, uint32_t slot);
  void show(int64_t version, uint32_t slot);  // offers it
  void on_digests(uint32_t slot);
  void check_ended();
  void end(const Status& status);
  void check_taken();  // by all, so that nobody pins it
  void stop_waiting_for_readers();
  void cut(const SourceLink& link) {
    if (staged() && link.leased()) owner_.on_lease_cut(link.slot(), link.process());
  }

  SenderSessionOwner& owner_;
  ReceiverLinks receivers_;
  ReceiverLinks owners_;  // ranks of this job that reduce what this one holds
  Preparation preparation_;
  OfferDigests digests_;
  int64_t rank_bytes_ = 0;
  bool left_ = false;
  Status leaving_;  // why, once leave() was called

  std::vector<int64_t> on_offer_;  // by slot, the version; 0: none
  std::vector<int64_t> deltas_;    // of a Grant

  Phase phase_ = Phase::kIdle;  // staged: only kPreparing and kFailing
  int64_t offering_ = 0;        // or being prepared
  int64_t held_ = 0;            // the version that the receivers take, or may: chosen by their rank 0
  Status failure_;
  Status failure_cause_;  // as others hear it
  TimePoint last_activity_{};
  EventLoop::TimerId revoke_timer_ = 0;
};

}  // namespace tessera::bus
