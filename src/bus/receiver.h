// The receiving side of a batch.
//
//   idle --recv()--> waiting --chosen--> pulling --all pulled--> idle, version held
//                       |                    |
//                    failure              failure: runs are aborted, the batch stays torn
//
// Rank 0 chooses: the newest version that every sender offers. The others are told (epoch, version).
#pragma once

#include <map>

#include "bus/batch.h"
#include "bus/pull_link.h"

namespace tessera::bus {

class ReceiverBatch final : public BatchImpl, public PullLinkOwner {
 public:
  explicit ReceiverBatch(BatchSetup setup);
  ~ReceiverBatch() override;

  std::shared_ptr<Operation> recv(std::optional<int64_t> min_version, Timeout timeout) override;
  int64_t newest() const override { return newest_.load(); }
  int64_t wait_version(int64_t version, Timeout timeout) override;
  bool torn() const override { return torn_.load(); }
  void accept(Caller caller) override;  // ranks other than 0, at rank 0

 private:
  enum class Phase { kIdle, kWaiting, kPulling, kFailing };

  void connect() override;
  std::vector<std::string> unready() const override;
  void detach_all(const Status& why) override;
  Progress sample() const override;
  void fail_operation(const Status& status) override;
  void on_broken(const Status& latest) override;
  void on_deadline() override;
  bool cancel_operation() override;

  void on_pull_ready(PullLink& link) override;
  void on_offer(PullLink& link) override;
  void on_pulled(PullLink& link, const Status& status) override;
  void on_granted(PullLink& link) override;
  void on_pull_detached(PullLink& link, const Status& reason) override;
  void on_pull_lost(PullLink& link, const Status& status) override;
  void on_pull_broken(PullLink& link, const Status& status) override;

  std::vector<Wanted> wanted_from(Rank rank, std::span<const uint32_t> ties) const;
  bool leads() const { return identity().rank == 0; }
  void adopt_leader(std::shared_ptr<Link> link);
  void handle_leader(Frame& frame);
  void lose_fellow(const std::string& name, const Status& status);
  int64_t complete_version() const;  // that all senders offer; 0 if none
  void choose();                     // rank 0
  void begin(const Chosen& chosen);
  void take_more();
  void check_ended();
  void watch_progress();
  Duration progress_period() const;
  std::string who_has_not_offered() const;
  bool needs_lost_sender() const;
  bool may_go_on() const override;
  void end_waits();  // REQUIRES: a version is being taken or chosen
  void broadcast_broken();

  std::vector<std::unique_ptr<PullLink>> links_;     // by rank of the sending job
  std::map<Rank, std::shared_ptr<Link>> followers_;  // rank 0: the others
  std::shared_ptr<Link> leader_;                     // the others: rank 0
  bool leader_welcomed_ = false;
  bool leader_ready_ = false;
  std::optional<Chosen> chosen_;  // announced, not yet taken
  uint32_t epoch_ = 0;            // of the last transfer

  Phase phase_ = Phase::kIdle;
  int64_t min_version_ = 0;
  int64_t taking_ = 0;
  std::vector<PullLink*> to_take_;  // in the order in which they will be asked
  size_t rings_busy_ = 0;
  Status failure_;
  bool broken_told_ = false;
  bool sender_lost_ = false;  // what broke the batch: then the other senders must be told, who have no links to it
  EventLoop::TimerId progress_timer_ = 0;
  int64_t progress_seen_ = 0;

  std::atomic<int64_t> newest_{0};
  std::atomic<bool> torn_{false};
};

}  // namespace tessera::bus
