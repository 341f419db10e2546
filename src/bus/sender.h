// A batch that is offered: one version at a time, to every job that is attached.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "bus/batch.h"
#include "bus/sender_session.h"

namespace tessera::bus {

class SenderBatch final : public BatchImpl, public SenderSessionOwner {
 public:
  explicit SenderBatch(BatchSetup setup) : BatchImpl(std::move(setup)) {}

  void open(const PairView& view, Deadline deadline) override;
  std::shared_ptr<Operation> send(std::optional<int64_t> version, Timeout timeout) override;

 private:
  bool sends() const override { return true; }
  std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) override;
  void on_met(std::shared_ptr<Session> session) override;
  void on_not_met(const std::string& job, const Status& why) override;

  void on_taking(SenderSession& session) override;
  void on_offer_over(SenderSession& session, const Status& status) override;
  void on_sender_retired(SenderSession& session) override;

  void fail_operation(const Status& status) override;
  void on_deadline() override;
  bool cancel_operation() override;
  Progress sample_sessions() const override;
  void close_sessions() override;

  void watch_jobs();
  void meet_also(const std::string& job);
  void check_ended();
  bool any_offering() const;
  Status nobody_attached() const;

  std::map<std::string, std::shared_ptr<SenderSession>> sessions_;  // by receiving job
  std::map<std::string, Status> absent_;                            // why a job that was met is not attached
  std::unique_ptr<Watch> jobs_watch_;
  int64_t offering_ = 0;  // 0: nothing
  int64_t newest_ = 0;    // that was ever offered, sent or not
  bool ending_ = false;   // it is failing: nobody is offered it any more
  bool taken_ = false;    // by a whole job
  Status failure_;        // of the offer: it ends with that once nobody reads any more
  Status lost_;           // a job that was at it
  // A loss that no call has ended with: the next one does, unless the job has come back by then.
  Status unreported_;
  const SenderSession* reported_ = nullptr;
};

}  // namespace tessera::bus
