// A batch's dealings with one other job. It registers with that job, which gives a session; and again, in the
// background, whenever the session has ended: processes may be replaced, and a whole job may come back with another
// world, mesh or layout. Everything is matched and planned again then.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "bus/registration/batch_exchange.h"
#include "bus/session/session.h"

namespace tessera::bus {

// What a meeting registers, and its listener.
class MeetingOwner {
 public:
  virtual ~MeetingOwner() = default;
  // --- any thread ---
  virtual BatchOffer own_offer() const = 0;
  // Plans what was agreed on. Throws Error for what cannot be.
  virtual std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) = 0;
  // --- on the loop's thread ---
  virtual void on_met(std::shared_ptr<Session> session) = 0;  // attached
  virtual void on_not_met(const std::string& job, const Status& why) = 0;
  // The job of a meeting that parts has left the pair: nothing more is done until it is stopped.
  virtual void on_parted(const std::string&) {}
};

class Meeting {
 public:
  // `view` need have no ranks yet if the first registration is in the background. One that `parts` does not wait for a
  // job that has left the pair.
  Meeting(Agent& agent, Rendezvous& rendezvous, BatchExchange& exchange, MeetingOwner& owner, std::string batch,
          PairView view, bool parts);
  ~Meeting();  // REQUIRES: stopped, or nothing was ever registered in the background

  const std::string& job() const { return job_; }
  // Registers and attaches on the caller's thread; on_met() has been called when it returns. Throws.
  void meet(const CallLimits& limits);
  // The same on a thread of its own, as often as it takes, now that a session has ended or another job has come.
  void meet_in_background();
  // Runs `task`, which may block for a while and must not throw, on that thread; not at all if stop() comes first. It
  // need not keep the owner alive.
  void do_in_background(std::function<void()> task);
  // No more registrations, and no more tasks once it returns; what was published is taken back. Not on the loop's
  // thread.
  void stop();

 private:
  std::shared_ptr<Session> meet_once(const CallLimits& limits);
  std::shared_ptr<Session> register_and_attach(const CallLimits& limits);
  void log_registration_failure(const Status& why) const;
  void wake() REQUIRES(mutex_);
  void work();
  enum class Outcome { kMet, kFailed, kTold, kParted };  // kTold: another rank has failed, and may be at it again
  Outcome retry();
  void withdraw();
  template <typename Request>
  void take_back(const Request& request);  // of the store; what fails is logged

  Agent& agent_;
  Rendezvous& rendezvous_;
  BatchExchange& exchange_;
  MeetingOwner& owner_;
  const std::string batch_;
  const std::string job_;
  const std::string subject_;  // "weights/policy", in traces
  const bool parts_;
  PairView view_;           // of the thread that meets
  std::string last_error_;  // likewise
  bool parted_ = false;     // likewise
  std::stop_source stop_;
  Mutex mutex_;
  StoppableCondVar changed_;
  bool wanted_ GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  // Of the present try: ended by stop(), by a task and by a process that is replaced meanwhile.
  std::stop_source round_ GUARDED_BY(mutex_);
  std::thread thread_ GUARDED_BY(mutex_);  // started by the first that needs it
};

}  // namespace tessera::bus
