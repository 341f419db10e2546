// The receiving side of a session.
//
//   idle --recv()--> waiting --chosen--> taking a version --over--> idle
//                       \--failure--> idle
//
// election.h chooses the version; taken_version.h takes it.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "bus/receiver/election.h"
#include "bus/receiver/in_place_version.h"
#include "bus/receiver/leased_version.h"
#include "bus/receiver/own_ranks.h"
#include "bus/receiver/staged_version.h"
#include "bus/receiver/taken_version.h"
#include "bus/session/pull_link.h"
#include "bus/session/session.h"
#include "tessera/bus.h"

namespace tessera::bus {

class ReceiverSession final : public Session, public PullLinkOwner {
 public:
  // REQUIRES: `batch` is there until close()
  ReceiverSession(SessionSetup setup, ReceiverBatch& batch);
  ~ReceiverSession() override;

  void accept(Caller caller) override;  // rank 0 accepts the other ranks of its job
  bool idle() const override { return !busy() && !may_go_on(); }
  RankShare share() const override { return share_; }
  // If a rank of this job closed the batch normally, the whole job leaves it so: the senders have lost nothing.
  Status parting() const override { return left_ ? Status() : broken_status(); }

  // Whether a recv() may begin: the session is not broken, or a version was chosen that can still be taken.
  bool usable() const { return !broken() || (!retired() && election_.chosen() && may_go_on()); }
  // Takes a version of at least `min_version` that this session has not delivered yet.
  void recv(int64_t min_version);
  bool waiting() const { return waiting_; }
  // Ends the recv with `status` once nothing writes any more.
  void fail_recv(const Status& status);
  void end_wait(const Status& status);                         // `status` stays unchanged. REQUIRES: waiting()
  void expire();                                               // nothing has come for the version for too long
  std::string missing() const { return election_.missing(); }  // the ranks awaited
  // Names the ranks awaited, and what for: "trainer/0 to offer version 8". Empty while it waits for none, or pulls.
  std::string awaited() const;
  int64_t min_version() const { return election_.min_version(); }
  // This rank has that version: it has learned the decision in the meantime.
  void hold(int64_t version) { election_.held(version); }
  // The store's decision of that epoch. `reason` of an abort, or why it gave no answer: then kAskStore ends the recv.
  void decided(uint32_t epoch, Decided::Verdict verdict, const Status& reason);
  int64_t complete_version() const { return newest_; }  // the newest that all senders offer; 0: none
  void sum_digests(std::vector<Digest>& sums) const;
  Progress sample() const;  // any thread

 private:
  void connect() override;
  std::vector<Linked> linked() const override;
  std::string leader() const override { return rank_name(identity().job, 0); }
  std::vector<Link*> links() const override;
  std::vector<Link*> awaited_links() const override;
  void detach_all(const Status& why) override;
  void on_broken(const Status& latest) override;
  bool may_go_on() const override;

  void on_pull_ready(PullLink& link) override;
  void on_offer(PullLink& link) override;
  void on_withdrawn(PullLink& link, int64_t version) override;
  void on_held(PullLink& link, bool held) override;
  void on_pulled(PullLink& link, const Status& status) override;
  void on_granted(PullLink& link) override;
  void on_copied(PullLink& link) override;
  void on_pull_detached(PullLink& link, const Status& reason) override;
  void on_pull_lost(PullLink& link, const Status& status) override;
  void on_pull_broken(PullLink& link, const Status& status) override;

  bool leads() const { return election_.leads(); }
  bool busy() const { return waiting_ || taken_ != nullptr; }
  void adopt_leader(std::shared_ptr<Link> link);
  void handle_leader(Frame& frame);
  void leave_with(const Detach& detach, const std::string& name);
  void handle_got(Rank rank, const Got& got);
  void handle_decided(const Decided& decided);
  void handle_flow(const ProgressReport& report);
  void begin(Chosen chosen);
  TakenVersion& make_version(const Chosen& chosen);
  void end_version(const Status& status);
  void check_over();
  void watch_progress();
  void broadcast_broken();

  ReceiverBatch& batch_;
  SenderLinks links_;
  OwnRanks own_ranks_;
  Election election_;
  RankShare share_;

  bool waiting_ = false;           // recv() waits for a version to be chosen
  TakenVersion* taken_ = nullptr;  // the version under way; not while waiting_
  const ReceiverParts parts_;
  // Memory of the version under way, so that a transfer allocates nothing; an ended one stays until the next begins.
  std::variant<std::monostate, InPlaceVersion, StagedVersion, LeasedVersion> version_;

  int64_t newest_ = 0;  // the newest that all senders offer, as rank 0 determines it
  bool broken_told_ = false;
  bool sender_lost_ = false;  // why it broke: the other senders must be told, since they have no links to that one
  EventLoop::TimerId progress_timer_ = 0;
  bool left_ = false;  // broken because a rank of this job has closed the batch normally
};

}  // namespace tessera::bus
