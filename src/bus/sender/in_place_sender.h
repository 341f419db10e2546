// Sends the registered tensors themselves, to all jobs that are attached. A send is over once each of them has the
// version, or has failed to take it and reads no more.
#pragma once

#include <set>

#include "bus/sender/sender_batch.h"

namespace tessera::bus {

class InPlaceSender final : public SenderBatch {
 public:
  explicit InPlaceSender(BatchSetup setup) : SenderBatch(std::move(setup)) {}

  // --- for what is offered, on the loop's thread ---
  void on_reading(SenderSession& session);  // a receiver, or an owner of a reduction, begins to read
  // Nobody reads the version any more; every receiving rank has it, or why not.
  void on_offer_over(SenderSession& session, const Status& status);

  std::unique_ptr<OfferedVersion> make_offered(SenderSession& session, uint32_t slot) override;
  void on_others_ahead(int64_t version) override { on_terms_ahead(version); }
  void on_unpinned() override;

 private:
  void on_met(std::shared_ptr<Session> session) override;
  void check_before_send() override;
  void begin_send() override { offer_all(); }
  void check_ended() override;
  void note_begun(int64_t version) override;
  Withdrawal try_withdraw(int64_t version) override;
  void fall_behind(int64_t version) override;
  Untaken untaken() const override;
  void on_attached(SenderSession& session, bool first) override;
  void on_dropped(const SenderSession& session) override { newcomers_.erase(&session); }
  void note_absence(const SenderSession& session) override;
  void on_deadline() override;
  bool cancel_operation() override;
  std::vector<std::string> waits_for() const override;

  void offer_all();
  void join(int64_t version, const Status& why);
  void offer_joined();
  void end_grace();
  void leave_newcomers();
  Status nobody_attached() const;

  // Jobs that came while others were there and have taken nothing yet, or did not come to take a version in time. The
  // ranks of this job may have met them at different versions, so that a send does not wait for them before they have
  // begun to take it from all ranks.
  std::set<const SenderSession*> newcomers_;
  int64_t joining_ = 0;  // offered instead, once nobody is offered the other any more. 0: nothing
  bool begun_ = false;   // a receiver has begun to take what is offered, and may have left since
  bool taken_ = false;   // by a whole job
  Status lost_;          // a job that was at it
  EventLoop::TimerId grace_ = 0;
  // A loss that no call has ended with: the next one does, unless the job has come back by then.
  Status unreported_;
  const SenderSession* reported_ = nullptr;
};

}  // namespace tessera::bus
