// Keeps a batch registered with one other job. Each registration gives a session; when a session has ended, it
// registers again in the background: processes may be replaced, and a whole job may come back with another world, mesh
// or layout. Everything is then matched and planned again.
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
  // Plans what was agreed on. Throws Error if it cannot be done.
  virtual std::shared_ptr<Session> make_session(const PairView& view, Agreement agreement) = 0;
  // --- on the loop's thread ---
  virtual void on_met(std::shared_ptr<Session> session) = 0;  // it is attached
  virtual void on_not_met(const std::string& job, const Status& why) = 0;
  // Only with `parts`: the meeting's job has left the pair; nothing more happens until stop().
  virtual void on_parted(const std::string&) {}
};

class Meeting {
 public:
  // `view` may lack ranks if the first registration runs in the background. With `parts` it does not wait for a job
  // that has left the pair.
  Meeting(Agent& agent, Rendezvous& rendezvous, BatchExchange& exchange, MeetingOwner& owner, std::string batch,
          PairView view, bool parts);
  ~Meeting();  // REQUIRES: stopped, or nothing was ever registered in the background

  const std::string& job() const { return job_; }
  // Registers and attaches on the caller's thread; on_met() has been called when it returns. Throws Error.
  void meet(const CallLimits& limits);
  // The same on a separate thread, as often as it takes, after a session has ended or another job has come.
  void meet_in_background();
  // Runs `task`, which may block for a while and must not throw, on that thread; not at all if stop() comes first. The
  // task need not keep the owner alive.
  void do_in_background(std::function<void()> task);
  // Ends registrations and tasks: none runs once it returns, and published records are withdrawn. Not on the loop's
  // thread.
  void stop();

 private:
  std::shared_ptr<Session> meet_once(const CallLimits& limits);
  std::shared_ptr<Session> register_and_attach(const CallLimits& limits);
  void log_registration_failure(const Status& why) const;
  void wake() REQUIRES(mutex_);
  void work();
  enum class Outcome { kMet, kFailed, kTold, kParted };  // kTold: another rank has failed, and may do so again
  Outcome retry();
  void withdraw();
  template <typename Request>
  void take_back(const Request& request);  // removes its records from the store; failures are logged

  Agent& agent_;
  Rendezvous& rendezvous_;
  BatchExchange& exchange_;
  MeetingOwner& owner_;
  const std::string batch_;
  const std::string job_;
  const std::string subject_;  // "weights/policy", in traces
  const bool parts_;
  PairView view_;           // used by the thread that registers
  std::string last_error_;  // likewise
  bool parted_ = false;     // likewise
  std::stop_source stop_;
  Mutex mutex_;
  StoppableCondVar changed_;
  bool wanted_ GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  // Of the current attempt: ended by stop(), by a task, and by a process that is replaced.
  std::stop_source round_ GUARDED_BY(mutex_);
  std::thread thread_ GUARDED_BY(mutex_);  // started when first needed
};

}  // namespace tessera::bus
